// Body of paged_attention; see kernels.h. Part of table_*.cc.
#ifndef WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_
#define WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Tokens whose keys and values stay in the first-level cache while every query
// head of the group uses them: 2 * 16 * C floats. A multiple of every kWidth.
constexpr int64_t kBlockTokens = 16;
// Query heads whose running sums are kept at a time.
constexpr int64_t kMaxGroup = 32;

// Lanes whose sum is the dot product of all whole vectors of a and b.
WEFT_INLINE Vec DotLanes(const float* a, const float* b, int64_t size) {
  Vec even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * kWidth <= size; i += 2 * kWidth) {
    even += Load(a + i) * Load(b + i);
    odd += Load(a + i + kWidth) * Load(b + i + kWidth);
  }
  if (i + kWidth <= size) even += Load(a + i) * Load(b + i);
  return even + odd;
}

// Adds the products of what is left to a sum of DotLanes.
WEFT_INLINE float AddDotRest(const float* a, const float* b, int64_t size,
                             float sum) {
  for (int64_t i = size / kWidth * kWidth; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// Consecutive tokens of one page, `stride` floats apart.
struct KvBlock {
  const float* k;
  const float* v;
  int64_t num_tokens;
  int64_t stride;
};

// q . k of every token of the block, four at a time; 0 past its tokens.
WEFT_INLINE void DotKeys(const KvBlock& block, const float* q_C, int64_t size,
                         float* scores) {
  const auto key = [&](int64_t t) { return block.k + t * block.stride; };
  int64_t t = 0;
  for (; t + 4 <= block.num_tokens; t += 4) {
    StoreQuad(scores + t, SumEach(DotLanes(q_C, key(t), size),
                                  DotLanes(q_C, key(t + 1), size),
                                  DotLanes(q_C, key(t + 2), size),
                                  DotLanes(q_C, key(t + 3), size)));
  }
  for (; t < block.num_tokens; ++t) {
    scores[t] = Sum(DotLanes(q_C, key(t), size));
  }
  if (size % kWidth != 0) {
    for (t = 0; t < block.num_tokens; ++t) {
      scores[t] = AddDotRest(q_C, key(t), size, scores[t]);
    }
  }
  for (t = block.num_tokens; t < kBlockTokens; ++t) scores[t] = 0;
}

// Running softmax of one query head; its row of `out` holds the sum of
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

// out += sum over tokens of weights[t] * v[t].
WEFT_INLINE void AddValues(const KvBlock& block, const float* weights,
                           int64_t size, float* out) {
  int64_t c = 0;
  // Four sums at a time: one alone waits for its own last addition.
  for (; c + kStride <= size; c += kStride) {
    Vec sums[kUnroll];
    for (int64_t u = 0; u < kUnroll; ++u) sums[u] = Load(out + c + u * kWidth);
    for (int64_t t = 0; t < block.num_tokens; ++t) {
      const float* v = block.v + t * block.stride + c;
      for (int64_t u = 0; u < kUnroll; ++u) {
        sums[u] += weights[t] * Load(v + u * kWidth);
      }
    }
    for (int64_t u = 0; u < kUnroll; ++u) Store(out + c + u * kWidth, sums[u]);
  }
  for (; c + kWidth <= size; c += kWidth) {
    Vec sum = Load(out + c);
    for (int64_t t = 0; t < block.num_tokens; ++t) {
      sum += weights[t] * Load(block.v + t * block.stride + c);
    }
    Store(out + c, sum);
  }
  for (; c < size; ++c) {
    for (int64_t t = 0; t < block.num_tokens; ++t) {
      out[c] += weights[t] * block.v[t * block.stride + c];
    }
  }
}

// Replaces all scores of a block; those past its tokens must be 0 before.
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

// The block that begins at `token`: up to the end of its page, of the item or
// of kBlockTokens.
WEFT_INLINE KvBlock BlockAt(const PagedAttentionItem& item, int64_t token) {
  const int64_t stride = item.num_kv_heads * item.head_features;
  const int64_t row = token % item.page_tokens;
  const int64_t page = item.page_table[token / item.page_tokens];
  const int64_t offset = (page * item.page_tokens + row) * stride;
  int64_t size = kBlockTokens;
  if (size > item.page_tokens - row) size = item.page_tokens - row;
  if (size > item.end - token) size = item.end - token;
  return {item.k_pages + offset, item.v_pages + offset, size, stride};
}

// The weights of the model have passed through the caches since this sequence's
// last token, and no processor foresees the rows of one head in pages.
WEFT_INLINE void FetchBlock(const KvBlock& block, int64_t head_features) {
  constexpr int64_t kLineFloats = 16;
  for (int64_t t = 0; t < block.num_tokens; ++t) {
    for (int64_t c = 0; c < head_features; c += kLineFloats) {
      __builtin_prefetch(block.k + t * block.stride + c);
      __builtin_prefetch(block.v + t * block.stride + c);
    }
  }
}

// At most kMaxGroup query heads; see PagedAttention.
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
