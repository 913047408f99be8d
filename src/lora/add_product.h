// Adds a product of matrices to a gradient with ATen.
#ifndef WEFT_SRC_LORA_ADD_PRODUCT_H_
#define WEFT_SRC_LORA_ADD_PRODUCT_H_

#include <ATen/core/Tensor.h>

namespace weft::lora {

// Computes gradient += scale * a b, with products and sums in the gradient's
// dtype. a and b have the same dtype, which may be narrower than the
// gradient's.
// Shapes: a [M, n], b [n, N]; gradient [M, N] may be a view.
void AddProduct(at::Tensor gradient, const at::Tensor& a, const at::Tensor& b,
                double scale);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_ADD_PRODUCT_H_
