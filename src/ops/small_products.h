// Small products of f32 matrices, for one thread. Private to src/ops.
#ifndef WEFT_SRC_OPS_SMALL_PRODUCTS_H_
#define WEFT_SRC_OPS_SMALL_PRODUCTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/panel_product.h"

namespace weft::ops {

// Multiplies by panels (kernels/cpu/panel_product.h). LibTorch's products take
// an older code path of MKL on AMD processors: on Zen 5, attention takes 1.9
// times as long with them. Keeps its buffer from product to product. The bits
// of an element of a product do not depend on other rows or columns. Threads:
// each thread has its own object.
class PanelMultiplier {
 public:
  // Computes out = alpha a b, or adds this product to out if `adds`.
  // Shapes:  a [M, K], b [K, N], out [M, N], f32 on the CPU, K >= 1. a may
  //          have any strides, b has stride 1 in one dimension, and elements
  //          of a row of out are adjacent.
  void Multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                bool adds, double alpha);

  // Does the same with an alpha of 1, but adds term by term, so that the bits
  // do not depend on how terms are cut into products that are added.
  void MultiplyInOrder(const at::Tensor& out, const at::Tensor& a,
                       const at::Tensor& b, bool adds);

 private:
  // Computes a product that has its scale and its order.
  void Run(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
           kernels::cpu::PanelProduct product);

  std::unique_ptr<float[]> panels_;
  int64_t capacity_ = 0;  // The number of floats in `panels_`.
};

// Multiplies in the arithmetic of bf16: both operands are rounded to bf16, and
// sums are f32. Keeps its buffers from product to product. Threads: each thread
// has its own object.
class Bf16Multiplier {
 public:
  // Computes out = alpha a b, or adds this product to out if `adds`.
  // Shapes:  a [M, K], b [K, N], out [M, N], f32 on the CPU, K >= 1. a and b
  //          may be transposed views; elements of a row of out are adjacent.
  // Errors:  throws c10::Error if the processor lacks the instructions.
  void Multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                bool adds, double alpha);

 private:
  // The first operand a, times alpha. If a is not a transposed view, RoundRows
  // writes its rounded rows to rounded_. Otherwise MultiplyRows rounds and
  // packs them.
  struct Rows {
    const at::Tensor& a;
    float alpha;
    bool is_transposed;
    int64_t rounded_stride;
  };
  Rows RoundRows(const kernels::cpu::Bf16KernelTable& kernels,
                 const at::Tensor& a, float alpha);
  // Computes the product `all`. Its first operand is the columns of x from
  // `input` on.
  void MultiplyRows(const kernels::cpu::Bf16KernelTable& kernels, const Rows& x,
                    int64_t input, kernels::cpu::Bf16PanelProduct all);

  using PanelPtr = std::unique_ptr<kernels::cpu::Bf16Panel>;

  std::vector<uint16_t> rounded_;
  PanelPtr rows_ = std::make_unique_for_overwrite<kernels::cpu::Bf16Panel>();
  PanelPtr panel_ = std::make_unique_for_overwrite<kernels::cpu::Bf16Panel>();
};

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_SMALL_PRODUCTS_H_
