// Small products of f32 matrices by panels (kernels/cpu/panel_product.h), for
// one thread. LibTorch's products take an older code path of MKL on AMD
// processors. On Zen 5, attention takes 1.9 times as long with LibTorch's
// products as with these products. Private to src/ops.
#ifndef WEFT_SRC_OPS_PANEL_MULTIPLIER_H_
#define WEFT_SRC_OPS_PANEL_MULTIPLIER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace weft::ops {

// Keeps its buffer from product to product. The bits of an element of a product
// do not depend on other rows or columns. Threads: each thread has its own
// object.
class PanelMultiplier {
 public:
  // Computes out = alpha a b, or adds this product to out if `adds`.
  // Shapes:  a [M, K], b [K, N], out [M, N], f32 on the CPU, K >= 1. a may
  //          have any strides, b has stride 1 in one dimension, and elements
  //          of a row of out are adjacent.
  void Multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                bool adds, double alpha);

 private:
  std::unique_ptr<float[]> panels_;
  int64_t capacity_ = 0;  // The number of floats in `panels_`.
};

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_PANEL_MULTIPLIER_H_
