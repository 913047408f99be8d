// Prepares the heads of a projection for attention, in one launch. Normalizes
// the heads of q and k if the model has head norms. Applies rotary position
// embedding in half-split form. Both steps work in place. Writes the keys and
// values of tokens with a slot to the pages.
//
// Legend: T tokens, Q query heads, K key/value heads, C head features, P
// positions, S tokens of a page.
#ifndef WEFT_KERNELS_CUDA_ROTARY_H_
#define WEFT_KERNELS_CUDA_ROTARY_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// Heads [T, num_heads, C] that are contiguous in C. Strides are in elements.
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
  const float* cos_PC = nullptr;         // [P, C/2], like sin.
  const float* sin_PC = nullptr;
};

// The RmsNorm of every head of q and k before the rotation. Its results are
// rounded to the heads' dtype. If q_C is null, there is no norm.
struct HeadNorms {
  DType dtype = DType::kF32;  // Dtype of the weights: f32 or rows.dtype.
  float eps = 0;
  const void* q_C = nullptr;
  const void* k_C = nullptr;
};

// The slots to which keys and values go. If slots_T is null, keys and values
// are not written to pages.
struct KvSlots {
  HeadRows v;  // v has as many heads as k.
  // Token t goes to row slots_T[t] of the pages. If slots_T[t] is negative, its
  // key and value are not written.
  const int64_t* slots_T = nullptr;
  void* k_pages = nullptr;  // [pages * S, K, C] contiguous, like v_pages.
  void* v_pages = nullptr;
};

// Normalizes the heads of q and k if there are norms, and rotates their pairs
// (c, c + C/2) by the token's angles, in place. For tokens with a slot, writes
// the rotated k and the unchanged v to the pages.
// Errors:  cudaErrorInvalidValue for bf16 weights with f32 heads, or for a
//          token with 2^30 pairs or more; and those of the launch.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  reference::RotaryHead, RmsNormRow.
[[nodiscard]] cudaError_t Rotary(const RotaryRows& rows, const HeadNorms& norms,
                                 const KvSlots& slots, cudaStream_t stream);

// The inputs of RotaryBackward, and its output `v_to`.
struct HeadGradients {
  // dLoss/d(results of Rotary). `q` and `k` may be rows.q and rows.k. `v` has
  // as many heads as k, or none, and is copied to `v_to`.
  HeadRows q;
  HeadRows k;
  HeadRows v;
  HeadRows v_to;
  // The heads before their norms. Used only if there are norms.
  HeadRows raw_q;
  HeadRows raw_k;
};

// Writes dLoss/d(inputs) to rows.q and rows.k: first rotates the gradients
// back, then applies the backward pass of the norms if there are any. Errors
// and threads are those of Rotary.
// Source:  reference::RmsNormBackwardRow.
[[nodiscard]] cudaError_t RotaryBackward(const RotaryRows& rows,
                                         const HeadNorms& norms,
                                         const HeadGradients& gradients,
                                         cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_ROTARY_H_
