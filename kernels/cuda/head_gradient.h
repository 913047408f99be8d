// Computes the gradient of the output head's input. This computation is the
// last step of the head's backward pass.
// Legend: R rows, E entries (row, target), H hidden, V vocabulary.
#ifndef WEFT_KERNELS_CUDA_HEAD_GRADIENT_H_
#define WEFT_KERNELS_CUDA_HEAD_GRADIENT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// The operands of HeadGradient. Row r owns the entries [row_offsets[r],
// row_offsets[r + 1]). Matrices are contiguous.
struct HeadGradientRows {
  DType dtype = DType::kF32;  // The dtype of weight and out.
  int64_t num_rows = 0;       // R.
  int64_t hidden = 0;         // H.
  const float* projection_RH = nullptr;
  const float* factor_R = nullptr;
  const float* scale_R = nullptr;
  const int64_t* row_offsets = nullptr;  // [R + 1].
  const int64_t* targets_E = nullptr;    // Each in [0, V).
  const float* coefficient_E = nullptr;
  const void* weight_VH = nullptr;
  void* out_RH = nullptr;
};

// Computes out[r] = factor[r] * scale[r] * projection[r] plus the sum over the
// row's entries e of coefficient[e] * weight[targets[e]]. Adds in f32, in the
// order of the entries.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
[[nodiscard]] cudaError_t HeadGradient(const HeadGradientRows& rows,
                                       cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_HEAD_GRADIENT_H_
