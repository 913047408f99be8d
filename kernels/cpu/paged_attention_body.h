// Implements paged_attention of kernels.h by a running softmax over blocks of
// tokens. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_
#define WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_block.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_math.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The most query heads that AttendHeads computes at a time.
constexpr int64_t kMaxRows = 32;

// The softmax of one query head over the tokens so far: their largest score,
// and the sum of e^(score - max). The head's row of `out` holds the sum of
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

// Applies the softcap to kBlockTokens scores. Scores after the block's tokens
// must be 0.
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

// Adds a block to the softmax of each query head of the item. Meanwhile,
// `fetch` prefetches the next block. For the last block, `fetch` has nothing
// left to do.
WEFT_INLINE void AddBlockToHeads(const PagedAttentionItem& item, KvBlock block,
                                 BlockFetch& fetch, RunningSoftmax* states,
                                 float* out_NGC) {
  const int64_t features = item.head_features;
  for (int64_t n = 0; n < item.num_heads; ++n) {
    for (int64_t g = 0; g < item.group_size; ++g) {
      const int64_t row = n * item.group_size + g;
      fetch.Step();
      AddBlock(item, block, item.q_NGC + row * features, states[row],
               out_NGC + row * features);
    }
    block.k += features;
    block.v += features;
  }
}

// Computes an item with at most kMaxRows query heads.
void AttendHeads(const PagedAttentionItem& item, float* out_NGC,
                 float* lse_NG) {
  const int64_t features = item.head_features;
  const int64_t rows = item.num_heads * item.group_size;
  RunningSoftmax states[kMaxRows];
  for (int64_t i = 0; i < rows * features; ++i) out_NGC[i] = 0;
  const int64_t step = (kBlockTokens + rows - 1) / rows;
  BlockFetch fetch{.block = BlockAt(item, item.begin),
                   .features = item.num_heads * features,
                   .step = kBlockTokens};
  fetch.Step();
  for (int64_t token = item.begin; token < item.end;) {
    const KvBlock block = fetch.block;
    token += block.num_tokens;
    if (token < item.end) {
      fetch = {.block = BlockAt(item, token),
               .features = fetch.features,
               .step = step};
    }
    AddBlockToHeads(item, block, fetch, states, out_NGC);
  }
  for (int64_t row = 0; row < rows; ++row) {
    ScaleRow(out_NGC + row * features, 1.0F / states[row].sum, features);
    lse_NG[row] = states[row].max + __builtin_logf(states[row].sum);
  }
}

// Cuts the item into pieces of at most kMaxRows query heads. A piece has some
// key/value heads with all their query heads, or a part of the query heads of
// one key/value head.
void PagedAttention(const PagedAttentionItem& item, float* out_NGC,
                    float* lse_NG) {
  const int64_t features = item.head_features;
  const int64_t group = item.group_size;
  const int64_t queries = Smaller(group, kMaxRows);
  const int64_t heads = kMaxRows / queries;
  for (int64_t n = 0; n < item.num_heads;) {
    PagedAttentionItem piece = item;
    piece.k_pages += n * features;
    piece.v_pages += n * features;
    piece.num_heads = Smaller(heads, item.num_heads - n);
    for (int64_t g = 0; g < group; g += queries) {
      const int64_t row = n * group + g;
      piece.group_size = Smaller(queries, group - g);
      piece.q_NGC = item.q_NGC + row * features;
      AttendHeads(piece, out_NGC + row * features, lse_NG + row);
    }
    n += piece.num_heads;
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_
