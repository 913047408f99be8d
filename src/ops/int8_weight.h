// Frozen weights [O, I] in 8 bits.
//
// The weight is an int8 tensor [O, Int8RowBytes(I)]. Its rows have the format
// of kernels/cpu/int8_rows.h: the integers, then the scales of groups of 64
// inputs. The rows are Int8RowStride(I) bytes apart, so the tensor is not
// contiguous. narrow() of rows works as for any weight. The functions of
// matmul.h, RunRowProduct and the functions below know the format.
#ifndef WEFT_SRC_OPS_INT8_WEIGHT_H_
#define WEFT_SRC_OPS_INT8_WEIGHT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "kernels/cpu/int8_rows.h"
#include "src/ops/matmul.h"

namespace weft::ops {

using kernels::cpu::Int8RowBytes;
using kernels::cpu::Int8RowStride;

inline bool IsInt8(const at::Tensor& weight) {
  return weight.scalar_type() == at::kChar;
}

// Returns the weight [O, Int8RowBytes(I)] that has this memory, an int8 tensor
// [O, Int8RowStride(I)].
inline at::Tensor Int8WeightIn(const at::Tensor& memory, int64_t inputs) {
  return memory.narrow(1, 0, Int8RowBytes(inputs));
}
// Returns the memory of a weight, with the bytes behind its rows.
at::Tensor Int8Memory(const at::Tensor& weight);

// Quantises rows to `stored`, an int8 tensor [O, Int8RowBytes(I)] on any
// device, and returns nullopt. If a row has an infinite value or NaN, instead
// returns the first such row, and leaves the content of `stored` undefined.
// Shapes:  rows_OI [O, I] of any floating-point dtype, on the CPU.
// Errors:  throws c10::Error if `stored` has another shape or dtype.
// Threads: any.
std::optional<int64_t> QuantizeRows(const at::Tensor& rows_OI,
                                    const at::Tensor& stored);

// Returns a weight, in 8 bits or not, as numbers [O, I] in `dtype`. The numbers
// of a weight in 8 bits are exact in f32 and f64, and rounded once in bf16.
at::Tensor Widened(const at::Tensor& weight, at::ScalarType dtype);

// Returns the rows `index_T` of Widened(weight, dtype).
at::Tensor WidenedRows(const at::Tensor& weight, const at::Tensor& index_T,
                       at::ScalarType dtype);

// Returns whether Int8FewRows takes the operands: they are on CUDA, x has up to
// 64 rows of bf16, both have contiguous rows of at most kMaxInt8Stride elements
// (kernels/cuda/int8_weight.h) that begin at multiples of 16 bytes, and I is a
// multiple of 8.
bool TakesInt8FewRows(const at::Tensor& x_MI, const at::Tensor& weight);

// Computes y = x W^T + bias_O, where W is a weight of 8 bits, without widening
// it. Sums are f32, and no number of W is rounded. The bits of a row of y do
// not depend on other rows. An undefined bias adds nothing. The kernel may read
// W before earlier work on the stream is done, so no queued work may write W.
// Shapes:  x_MI [M, I] and weight [O, Int8RowBytes(I)] for which
//          TakesInt8FewRows is true; y_MO [M, O] of f32 or bf16, which may be
//          columns of a larger matrix.
// Errors:  throws c10::Error.
void Int8FewRows(const at::Tensor& x_MI, const at::Tensor& weight,
                 const at::Tensor& bias_O, at::Tensor y_MO);

// Returns a b + bias_N as MatMul does where no kernel of kernels/cpu takes the
// product. b is a weight of 8 bits or its transposed view. Calls Int8FewRows if
// it takes the product, and otherwise widens a part of b at a time.
at::Tensor MatMulOfInt8(const at::Tensor& a_MK, const at::Tensor& int8_KN,
                        const at::Tensor& bias_N);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_INT8_WEIGHT_H_
