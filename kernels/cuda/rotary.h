// Prepares the heads of a projection for attention, in one launch: norms each
// head if the model has head norms, applies rotary position embedding in
// half-split form, both in place, and writes keys and values to their pages.
// Legend: T tokens, Q query heads, K key/value heads, C head features, P
// positions, S tokens of a page.
#ifndef WEFT_KERNELS_CUDA_ROTARY_H_
#define WEFT_KERNELS_CUDA_ROTARY_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// [T, num_heads, C] with unit stride in C; strides in elements.
struct HeadRows {
  void* data = nullptr;
  int64_t num_heads = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

struct RotaryRows {
  DType dtype = DType::kF32;  // The heads' dtype; the angles are f32.
  int64_t num_tokens = 0;     // T.
  int64_t half_features = 0;  // C / 2.
  HeadRows q;
  HeadRows k;                            // May have no heads.
  const int32_t* positions_T = nullptr;  // Each < P.
  const float* cos_PC = nullptr;         // [P, C/2], as sin.
  const float* sin_PC = nullptr;
};

// The RmsNorm of every head before the rotation. Between the two, values are
// stored in the heads' dtype. Null weights: no norm.
struct HeadNorms {
  DType dtype = DType::kF32;  // The weights' dtype: that of the heads, or f32.
  float eps = 0;
  const void* q_C = nullptr;
  const void* k_C = nullptr;
};

// The slots of keys and values. Null: they are not written.
struct KvSlots {
  HeadRows v;  // As many heads as k.
  // Token t goes to row slots_T[t] of the pages. Below 0 it is not written.
  const int64_t* slots_T = nullptr;
  void* k_pages = nullptr;  // [pages * S, K, C] contiguous, as v_pages.
  void* v_pages = nullptr;
};

// Norms the heads of q and k, rotates their pairs (c, c + C/2) by the token's
// angles, and writes the rotated k and v to the pages.
// Errors:  cudaErrorInvalidValue for weights of bf16 beside heads of f32, or a
//          token of 2^30 pairs or more.
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  reference::RotaryHead, RmsNormRow.
[[nodiscard]] cudaError_t Rotary(const RotaryRows& rows, const HeadNorms& norms,
                                 const KvSlots& slots, cudaStream_t stream);

// The inputs of the backward pass.
struct HeadGradients {
  // dLoss/d(results); q and k may be those of the rows. v, of as many heads as
  // k or none, is copied to `v_to`.
  HeadRows q;
  HeadRows k;
  HeadRows v;
  HeadRows v_to;
  // The inputs of the norms; only with norms.
  HeadRows raw_q;
  HeadRows raw_k;
};

// Writes dLoss/d(inputs) to rows.q and rows.k: rotates back, then goes back
// through the norms.
// Errors and threads as above.   Source: reference::RmsNormBackwardRow.
[[nodiscard]] cudaError_t RotaryBackward(const RotaryRows& rows,
                                         const HeadNorms& norms,
                                         const HeadGradients& gradients,
                                         cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_ROTARY_H_
