#include "src/lora/add_product.h"

#include <ATen/ATen.h>

namespace weft::lora {

void AddProduct(at::Tensor gradient, const at::Tensor& a, const at::Tensor& b,
                double scale) {
  const at::ScalarType dtype = gradient.scalar_type();
  if (a.scalar_type() == dtype) {
    at::addmm_out(gradient, gradient, a, b, /*beta=*/1, /*alpha=*/scale);
  } else if (a.is_cuda()) {
    gradient.add_(at::mm(a, b, dtype), scale);
  } else {
    gradient.add_(at::mm(a.to(dtype), b.to(dtype)), scale);
  }
}

}  // namespace weft::lora
