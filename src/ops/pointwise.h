// Functions of single numbers. In f32 on a CPU, the bits of an element depend
// on this element alone. LibTorch's functions compute the last elements of a
// range by other code than the rest, so a row's bits would depend on its place
// in a batch.
#ifndef WEFT_SRC_OPS_POINTWISE_H_
#define WEFT_SRC_OPS_POINTWISE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace weft::ops {

// Returns 1 / (1 + e^-x), contiguous. Errors: throw c10::Error. Threads: any.
at::Tensor Sigmoid(const at::Tensor& x);

// Returns log(1 + e^x), contiguous.
at::Tensor Softplus(const at::Tensor& x);

// Replaces x, which is contiguous, by softcap * tanh(x / softcap).
void SoftcapInPlace(double softcap, at::Tensor& x);

// Adds factor(row) * x to each row of y. Shapes: x [features], y [rows,
// features] contiguous.
template <typename Factor>
void AddScaledRow(const float* x, Factor factor, int64_t rows, int64_t features,
                  float* y) {
  for (int64_t row = 0; row < rows; ++row, y += features) {
    const float scale = factor(row);
    for (int64_t i = 0; i < features; ++i) y[i] += scale * x[i];
  }
}

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_POINTWISE_H_
