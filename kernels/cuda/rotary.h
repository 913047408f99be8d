// Rotary position embedding in place, half-split form.
// Legend: T tokens, M heads, C head features, P positions.
#ifndef WEFT_KERNELS_CUDA_ROTARY_H_
#define WEFT_KERNELS_CUDA_ROTARY_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// Unit stride in C; strides in elements.
struct RotaryHeads {
  DType dtype = DType::kF32;  // Of x; the angles are f32.
  int64_t num_tokens = 0;     // T.
  int64_t num_heads = 0;      // M.
  int64_t half_features = 0;  // C / 2.
  void* x_TMC = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  const int32_t* positions_T = nullptr;  // Each < P.
  const float* cos_PC = nullptr;         // [P, C/2], as sin.
  const float* sin_PC = nullptr;
};

// Rotates the pairs (c, c + C/2) of every head by its token's angles; `inverse`
// rotates back.
// Errors:  cudaErrorInvalidValue for a token of 2^31 pairs or more.
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  reference::RotaryHead.
[[nodiscard]] cudaError_t Rotary(const RotaryHeads& heads, bool inverse,
                                 cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_ROTARY_H_
