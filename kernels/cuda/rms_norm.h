// Root-mean-square norm of rows, and its backward pass. AddRmsNorm first adds
// the rows to the residual stream.
//
// Legend: T rows, D features.
#ifndef WEFT_KERNELS_CUDA_RMS_NORM_H_
#define WEFT_KERNELS_CUDA_RMS_NORM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// Rows whose features are adjacent in memory. A stride is the distance from row
// to row, in elements.
struct RmsNormRows {
  DType dtype = DType::kF32;         // The dtype of x, y, dy and dx.
  DType weight_dtype = DType::kF32;  // Equal to `dtype`, or f32.
  int64_t num_rows = 0;              // T.
  int64_t features = 0;              // D.
  float eps = 0;
  const void* x_TD = nullptr;
  int64_t x_stride = 0;
  const void* weight_D = nullptr;
};

// Computes y = x * rsqrt(mean(x^2) + eps) * weight, with statistics in f32. y
// may be x. A NaN in x stays in its row.
// Errors:  cudaErrorInvalidValue for a bf16 weight with f32 rows; and those of
//          the launch.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  reference::RmsNormRow.
[[nodiscard]] cudaError_t RmsNorm(const RmsNormRows& rows, void* y_TD,
                                  int64_t y_stride, cudaStream_t stream);

// Computes sum += x, and then y = RmsNorm of the stored sum. The bits are those
// of a separate addition and RmsNorm. x, sum and y do not alias. Errors and
// threads as for RmsNorm.
[[nodiscard]] cudaError_t AddRmsNorm(const RmsNormRows& rows, void* sum_TD,
                                     int64_t sum_stride, void* y_TD,
                                     int64_t y_stride, cudaStream_t stream);

// Adds dLoss/dx to dx. Recomputes the statistics from x. dx may not alias dy or
// x. Errors and threads as for RmsNorm.
// Source:  reference::RmsNormBackwardRow.
[[nodiscard]] cudaError_t RmsNormBackward(const RmsNormRows& rows,
                                          const void* dy_TD, int64_t dy_stride,
                                          void* dx_TD, int64_t dx_stride,
                                          cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_RMS_NORM_H_
