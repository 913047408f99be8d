// The running softmax of paged attention, in powers of 2.
//
// Legend: lane 4 g + t as in paged_attention_pieces.cuh.
#ifndef WEFT_KERNELS_CUDA_PAGED_ATTENTION_SOFTMAX_CUH_
#define WEFT_KERNELS_CUDA_PAGED_ATTENTION_SOFTMAX_CUH_

#include <cmath>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/paged_attention.h"

namespace weft::kernels::cuda {

inline constexpr float kLog2E = 1.44269504F;

// The running softmax of two query heads, in powers of 2. `max` is over all
// tokens of the warp so far. `sum` is over the lane's own tokens, which are g
// and g + 8 of every step.
struct RunningSoftmax {
  float max[2] = {kLowest, kLowest};
  float sum[2] = {};
};

// Combines the values of all lanes with the same t. Each of these lanes gets
// the result.
template <typename Combine>
__device__ float ReduceTokens(float value, Combine combine) {
#pragma unroll
  for (int offset = 4; offset < kWarp; offset *= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// Turns a product q . k into a score. The token's weight is 2^score.
struct ScoreRule {
  float scale;
  float cap;  // 0: none.

  __device__ explicit ScoreRule(const PagedAttentionBatch& batch)
      : scale(batch.softcap > 0 ? batch.scale / batch.softcap
                                : batch.scale * kLog2E),
        cap(batch.softcap * kLog2E) {}
  __device__ float Of(float product) const {
    return cap > 0 ? cap * tanhf(product * scale) : product * scale;
  }
};

// Turns the products in `scores` into weights and updates `state`. Sets
// `shrink` to one factor per head. The caller must multiply the head's sums of
// earlier steps by this factor. Only the step's first num_tokens tokens exist;
// the others get weight 0.
__device__ inline void Weigh(const ScoreRule& rule, int num_tokens,
                             RunningSoftmax* state, float (&scores)[4],
                             float (&shrink)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool is_token = Lane() / 4 + i / 2 * 8 < num_tokens;
    scores[i] = is_token ? rule.Of(scores[i]) : -INFINITY;
  }
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    const float top =
        fmaxf(state->max[head],
              ReduceTokens(fmaxf(scores[head], scores[2 + head]), Max()));
    shrink[head] = exp2f(state->max[head] - top);
    state->max[head] = top;
    scores[head] = exp2f(scores[head] - top);
    scores[2 + head] = exp2f(scores[2 + head] - top);
    state->sum[head] =
        state->sum[head] * shrink[head] + scores[head] + scores[2 + head];
  }
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_PAGED_ATTENTION_SOFTMAX_CUH_
