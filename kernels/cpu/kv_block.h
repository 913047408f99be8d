// A block of tokens of paged attention: where its keys and values are, and
// their products with one query head. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_KV_BLOCK_H_
#define WEFT_KERNELS_CPU_KV_BLOCK_H_

#include "kernels/cpu/paged_attention.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The most tokens of a block. The block's keys and values of one head (2 * 16
// floats per feature) stay in the first-level cache while all query heads of
// this key/value head use them. The number is a multiple of every kWidth.
constexpr int64_t kBlockTokens = 16;

// Returns a vector whose lanes add up to the dot product of a and b. Leaves out
// the elements after the last whole vector.
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

// Returns `sum` plus the products of the elements that DotLanes leaves out.
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

// Computes q . k for every token of the block, four at a time. Sets the scores
// after the block's tokens to 0, up to kBlockTokens.
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

// Computes out += sum over tokens of weights[t] * v[t].
WEFT_INLINE void AddValues(const KvBlock& block, const float* weights,
                           int64_t size, float* out) {
  int64_t c = 0;
  // Computes four sums at a time, because each addition to a single sum would
  // wait for the one before it.
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

// Returns the block that begins at `token`. It ends after kBlockTokens tokens,
// or sooner at the end of the page or of the item.
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

// Prefetches the cache lines of a block, `step` tokens at a time. The model's
// weights have evicted these lines since the last decode step. The hardware
// does not prefetch them, because the rows of a head are not adjacent. If more
// lines are requested at once than a core keeps in flight, its loads wait (Zen
// 5, three heads of 96 tokens: 8.8 us in steps, 12.4 us at once; see
// PagedAttentionKernel of kernel_bench).
struct BlockFetch {
  KvBlock block;
  int64_t features;  // The number of adjacent features to fetch per token.
  int64_t step;
  int64_t done = 0;

  WEFT_INLINE void Step() {
    constexpr int64_t kLineFloats = 16;
    for (int64_t i = 0; i < step && done < block.num_tokens; ++i, ++done) {
      for (int64_t c = 0; c < features; c += kLineFloats) {
        __builtin_prefetch(block.k + done * block.stride + c);
        __builtin_prefetch(block.v + done * block.stride + c);
      }
    }
  }
};

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_KV_BLOCK_H_
