// Root-mean-square norm of rows, forward and backward, alone or after the
// addition to the residual stream.
// Legend: T rows, D features.
#ifndef WEFT_KERNELS_CUDA_RMS_NORM_H_
#define WEFT_KERNELS_CUDA_RMS_NORM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// Rows of adjacent features; strides in elements, from row to row.
struct RmsNormRows {
  DType dtype = DType::kF32;         // The dtype of x, y, dy and dx.
  DType weight_dtype = DType::kF32;  // The same, or f32.
  int64_t num_rows = 0;              // T.
  int64_t features = 0;              // D.
  float eps = 0;
  const void* x_TD = nullptr;
  int64_t x_stride = 0;
  const void* weight_D = nullptr;
};

// y = x * rsqrt(mean(x^2) + eps) * weight, statistics in f32. y may be x. A NaN
// stays in its row.
// Errors:  cudaErrorInvalidValue for a weight of bf16 beside rows of f32.
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  reference::RmsNormRow.
[[nodiscard]] cudaError_t RmsNorm(const RmsNormRows& rows, void* y_TD,
                                  int64_t y_stride, cudaStream_t stream);

// sum += x, then y = norm of the stored sum: the same bits as an addition and
// an RmsNorm after it. The three do not alias. Errors and threads as above.
[[nodiscard]] cudaError_t AddRmsNorm(const RmsNormRows& rows, void* sum_TD,
                                     int64_t sum_stride, void* y_TD,
                                     int64_t y_stride, cudaStream_t stream);

// Adds dLoss/dx to dx; the statistics are recomputed from x. dx may not alias
// dy or x. Errors and threads as above.
// Source:  reference::RmsNormBackwardRow.
[[nodiscard]] cudaError_t RmsNormBackward(const RmsNormRows& rows,
                                          const void* dy_TD, int64_t dy_stride,
                                          void* dx_TD, int64_t dx_stride,
                                          cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_RMS_NORM_H_
