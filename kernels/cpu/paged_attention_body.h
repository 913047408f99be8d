// Body of paged_attention: the softmax over blocks of tokens; see kernels.h.
// Part of table_*.cc.
#ifndef WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_
#define WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_block.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_math.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The number of query heads whose running sums are kept at a time.
constexpr int64_t kMaxGroup = 32;

// Running softmax of one query head. The head's row of `out` holds the sum of
// e^(score - max) v.
struct RunningSoftmax {
  float max = -__builtin_inff();
  float sum = 0;
};

WEFT_INLINE void ScaleRow(float* row, float factor, int64_t size) {
  int64_t c = 0;
  for (; c + kWidth <= size; c += kWidth) {
    Store(row + c, Load(row + c) * factor);
  }
  for (; c < size; ++c) row[c] *= factor;
}

// Caps all scores of a block. Scores after the block's tokens must be 0.
WEFT_INLINE void CapScores(float softcap, float* scores) {
  const float inverse = 1.0F / softcap;
  for (int64_t t = 0; t < kBlockTokens; t += kWidth) {
    Store(scores + t, softcap * Tanh(Load(scores + t) * inverse));
  }
}

WEFT_INLINE void AddBlock(const PagedAttentionItem& item, const KvBlock& block,
                          const float* q_C, RunningSoftmax& state,
                          float* out_C) {
  const int64_t head_features = item.head_features;
  float weights[kBlockTokens];
  DotKeys(block, q_C, head_features, weights);
  for (int64_t t = 0; t < kBlockTokens; t += kWidth) {
    Store(weights + t, item.scale * Load(weights + t));
  }
  if (item.softcap > 0) CapScores(item.softcap, weights);
  for (int64_t t = block.num_tokens; t < kBlockTokens; ++t) {
    weights[t] = -__builtin_inff();
  }
  Vec best = Fill(state.max);
  for (int64_t t = 0; t < kBlockTokens; t += kWidth) {
    best = Max(best, Load(weights + t));
  }
  const float max = MaxLane(best);
  if (max > state.max) {
    const float shrink = __builtin_expf(state.max - max);
    state.sum *= shrink;
    ScaleRow(out_C, shrink, head_features);
    state.max = max;
  }
  Vec sum{};
  for (int64_t t = 0; t < kBlockTokens; t += kWidth) {
    const Vec weight = Exp(Load(weights + t) - max);
    Store(weights + t, weight);
    sum += weight;
  }
  state.sum += Sum(sum);
  AddValues(block, weights, head_features, out_C);
}

// Computes the attention of up to kMaxGroup query heads; see PagedAttention.
void AttendGroup(const PagedAttentionItem& item, float* out_GC, float* lse_G) {
  const int64_t features = item.head_features;
  RunningSoftmax states[kMaxGroup];
  for (int64_t i = 0; i < item.group_size * features; ++i) out_GC[i] = 0;
  FetchBlock(BlockAt(item, item.begin), features);
  for (int64_t token = item.begin; token < item.end;) {
    const KvBlock block = BlockAt(item, token);
    token += block.num_tokens;
    if (token < item.end) FetchBlock(BlockAt(item, token), features);
    for (int64_t g = 0; g < item.group_size; ++g) {
      AddBlock(item, block, item.q_GC + g * features, states[g],
               out_GC + g * features);
    }
  }
  for (int64_t g = 0; g < item.group_size; ++g) {
    ScaleRow(out_GC + g * features, 1.0F / states[g].sum, features);
    lse_G[g] = states[g].max + __builtin_logf(states[g].sum);
  }
}

void PagedAttention(const PagedAttentionItem& item, float* out_GC,
                    float* lse_G) {
  for (int64_t first = 0; first < item.group_size; first += kMaxGroup) {
    PagedAttentionItem heads = item;
    heads.q_GC += first * item.head_features;
    heads.group_size = item.group_size - first;
    if (heads.group_size > kMaxGroup) heads.group_size = kMaxGroup;
    AttendGroup(heads, out_GC + first * item.head_features, lse_G + first);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_
