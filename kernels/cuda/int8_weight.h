// Products with weights of 8 bits (kernels/cpu/int8_rows.h).
//
//   WidenInt8Rows   writes a copy of the weight in a product's dtype;
//                   worthwhile if the product reads the weight many times
//   Int8FewRows     y = x W^T + bias for few rows, as in decoding; reads each
//                   byte of the weight from memory once
//
// Legend: M rows, I inputs, O outputs; B = Int8RowBytes(I).
#ifndef WEFT_KERNELS_CUDA_INT8_WEIGHT_H_
#define WEFT_KERNELS_CUDA_INT8_WEIGHT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// A weight of 8 bits.
struct Int8Weight {
  int64_t outputs = 0;              // O.
  int64_t inputs = 0;               // I.
  const int8_t* rows_OB = nullptr;  // Rows of B bytes, `stride` bytes apart.
  int64_t stride = 0;
};

// Returns whether the kernels take the weight: all rows begin at multiples of
// 16 bytes, and I is a multiple of 8.
[[nodiscard]] bool TakesInt8(const Int8Weight& weight);

// Writes the weights of the inputs [begin, end) to `wide`. They are exact in
// f32, and rounded once in bf16.
// Shapes:  wide [O, end - begin], contiguous and of `dtype`; begin is the first
//          input of a group, and end - begin is a multiple of 8.
// Errors:  cudaErrorInvalidValue if begin is not the first input of a group, if
//          rows of `wide` do not begin at multiples of 16 bytes, or without
//          TakesInt8.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  the format of kernels/cpu/int8_rows.h, in f64.
[[nodiscard]] cudaError_t WidenInt8Rows(const Int8Weight& weight, int64_t begin,
                                        int64_t end, DType dtype, void* wide,
                                        cudaStream_t stream);

// The most rows of Int8FewRows. With more rows, the tensor cores would take
// longer than the reads of the weight.
inline constexpr int64_t kMaxInt8FewRows = 64;
// The largest stride in Int8FewRows: in bytes for the weight, and in elements
// for x. Up to this stride, offsets in a block's rows fit into 32 bits.
inline constexpr int64_t kMaxInt8Stride = int64_t{1} << 25;

struct Int8FewRowsProduct {
  int64_t num_rows = 0;  // M, at most kMaxInt8FewRows.
  Int8Weight weight;
  // bf16; strides in elements. Rows begin at multiples of 16 bytes.
  const void* x_MI = nullptr;
  int64_t x_stride = 0;
  const void* bias_O = nullptr;  // bf16; null: no bias.
  DType y_dtype = DType::kBf16;
  void* y_MO = nullptr;
  int64_t y_stride = 0;
};

// Returns whether Int8FewRows takes x and the weight (TakesInt8): at most
// kMaxInt8FewRows rows, strides of at most kMaxInt8Stride, and rows of x that
// begin at multiples of 16 bytes.
[[nodiscard]] bool TakesInt8FewRows(const Int8FewRowsProduct& product);

// Computes y = x W^T + bias in one launch, without a workspace. Sums are f32:
// first over the integers of a group, times the group's scale, then over the
// groups. y is rounded once. A NaN stays in its row. A row's bits depend only
// on that row, the weight and the widths. The kernel starts early (LaunchEarly)
// and reads the weight immediately, so no queued launch may write the weight.
// Errors:  cudaErrorInvalidValue without TakesInt8FewRows.
// Threads: as for WidenInt8Rows.
// Source:  the formula in f64.
[[nodiscard]] cudaError_t Int8FewRows(const Int8FewRowsProduct& product,
                                      cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_INT8_WEIGHT_H_
