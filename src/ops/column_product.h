// Products with a weight that is widened to the rows' dtype, a part of its
// columns at a time. Private to src/ops.
#ifndef WEFT_SRC_OPS_COLUMN_PRODUCT_H_
#define WEFT_SRC_OPS_COLUMN_PRODUCT_H_

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include "src/ops/matmul.h"

namespace weft::ops {

// About this many elements of a weight are widened at a time.
inline constexpr int64_t kWidenedElements = 16 << 20;

// Returns a b + bias_N in the dtype of a. An undefined bias adds nothing. b has
// `outputs` columns, and columns(begin, end) returns a range of b's columns in
// the dtype of a. Asks for at most `step` columns at a time.
template <typename Columns>
at::Tensor MatMulByColumns(const at::Tensor& a_MK, int64_t outputs,
                           int64_t step, const at::Tensor& bias_N,
                           RowCount row_count, Columns columns) {
  const at::ScalarType dtype = a_MK.scalar_type();
  const at::Tensor bias = bias_N.defined() ? bias_N.to(dtype) : bias_N;
  if (step >= outputs) {
    return MatMul(a_MK, columns(0, outputs), bias, row_count);
  }
  at::Tensor y_MN = at::empty({a_MK.size(0), outputs}, a_MK.options());
  for (int64_t n = 0; n < outputs; n += step) {
    const int64_t count = std::min(step, outputs - n);
    y_MN.narrow(1, n, count)
        .copy_(MatMul(a_MK, columns(n, n + count),
                      bias.defined() ? bias.narrow(0, n, count) : bias,
                      row_count));
  }
  return y_MN;
}

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_COLUMN_PRODUCT_H_
