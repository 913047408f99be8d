// Body of the vocabulary row; see kernels.h. Part of table_*.cc.
//
// The row is walked in blocks that stay in the L1 cache: maximum of the block,
// then its exponentials against the running maximum m (kept, when the softmax
// is wanted, in place of the logits). A block that raises m rescales what was
// summed before. At the end one multiply per block, by e^(m_block - m) / sum,
// turns the kept exponentials into probabilities: no exponential is computed
// twice. Sums are f32 inside a block and f64 between blocks.
#ifndef WEFT_KERNELS_CPU_VOCAB_ROWS_BODY_H_
#define WEFT_KERNELS_CPU_VOCAB_ROWS_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

inline constexpr int64_t kBlock = 4096;
inline constexpr int64_t kMaxBlocks = kMaxVocab / kBlock;
inline constexpr float kLowest = -3.402823466e+38F;

// Running sums of a row against `max`, in units of the softcapped logit.
struct RowSums {
  float max = kLowest;
  double exps = 0;      // Sum of e^d with d = (c - max) / temperature.
  double weighted = 0;  // Sum of d e^d, for the entropy.
};

struct BlockSums {
  float exps;
  float weighted;
};

WEFT_INLINE float Lane0(Vec v) { return v[0]; }

WEFT_INLINE float SoftcapOne(float x, float softcap) {
  if (softcap <= 0) return x;
  return softcap * Lane0(Tanh(Fill(x / softcap)));
}

// Writes the softcapped logits and returns the maximum.
float CapBlock(const float* x, int64_t count, float softcap, float* capped) {
  const float inverse = 1.0F / softcap;
  Vec best = Fill(kLowest);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Vec c = softcap * Tanh(Load(x + i) * inverse);
    Store(capped + i, c);
    best = Max(best, c);
  }
  const int64_t rest = count - i;
  const Vec c = softcap * Tanh(LoadPart(x + i, rest, 0) * inverse);
  StorePart(capped + i, c, rest);
  float result = MaxLane(best);
  for (; i < count; ++i) {
    if (capped[i] > result) result = capped[i];
  }
  return result;
}

float MaxBlock(const float* x, int64_t count) {
  Vec best[kUnroll] = {Fill(kLowest), Fill(kLowest), Fill(kLowest),
                       Fill(kLowest)};
  int64_t i = 0;
  for (; i + kStride <= count; i += kStride) {
    for (int64_t u = 0; u < kUnroll; ++u) {
      best[u] = Max(best[u], Load(x + i + u * kWidth));
    }
  }
  for (; i + kWidth <= count; i += kWidth) best[0] = Max(best[0], Load(x + i));
  best[1] = Max(best[1], LoadPart(x + i, count - i, kLowest));
  return MaxLane(Max(Max(best[0], best[1]), Max(best[2], best[3])));
}

// Exponentials of one block and their sums.
template <bool kWrite, bool kEntropy, bool kSoftcap>
struct ExpBlock {
  float max;
  float inverse_temperature;
  float inverse_softcap;
  Vec exps[kUnroll] = {};
  Vec weighted[kUnroll] = {};

  // Returns what replaces the logits: e^d, times the softcap's derivative.
  WEFT_INLINE Vec Add(Vec c, int64_t u) {
    const Vec d = (c - max) * inverse_temperature;
    const Vec e = Exp(d);
    exps[u] += e;
    if constexpr (kEntropy) {
      // A logit of -inf adds 0 * inf = NaN unless it is left out.
      weighted[u] += e > Vec{} ? d * e : Vec{};
    }
    if constexpr (kSoftcap) {
      const Vec tanh = c * inverse_softcap;
      return e * (1.0F - tanh * tanh);
    }
    return e;
  }

  WEFT_INLINE BlockSums Run(const float* c, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + kStride <= count; i += kStride) {
      for (int64_t u = 0; u < kUnroll; ++u) {
        const Vec kept = Add(Load(c + i + u * kWidth), u);
        if constexpr (kWrite) Store(out + i + u * kWidth, kept);
      }
    }
    for (; i + kWidth <= count; i += kWidth) {
      const Vec kept = Add(Load(c + i), 0);
      if constexpr (kWrite) Store(out + i, kept);
    }
    if (const int64_t rest = count - i; rest > 0) {
      const Vec kept = Add(LoadPart(c + i, rest, -__builtin_inff()), 1);
      if constexpr (kWrite) StorePart(out + i, kept, rest);
    }
    return {Sum((exps[0] + exps[1]) + (exps[2] + exps[3])),
            Sum((weighted[0] + weighted[1]) + (weighted[2] + weighted[3]))};
  }
};

// Moves the sums to a new maximum.
WEFT_INLINE void Rescale(RowSums& sums, float max, float inverse_temperature) {
  if (sums.exps != 0) {
    const double shift = (static_cast<double>(sums.max) - max) *
                         static_cast<double>(inverse_temperature);
    const double factor = __builtin_exp(shift);
    sums.weighted = factor * (sums.weighted + sums.exps * shift);
    sums.exps *= factor;
  }
  sums.max = max;
}

// Scales each block's exponentials to probabilities.
WEFT_INLINE void Normalize(float* row, int64_t vocab, const float* block_max,
                           const RowSums& sums, float inverse_temperature) {
  for (int64_t begin = 0, block = 0; begin < vocab; begin += kBlock, ++block) {
    const double shift = (static_cast<double>(block_max[block]) - sums.max) *
                         static_cast<double>(inverse_temperature);
    const float factor = static_cast<float>(__builtin_exp(shift) / sums.exps);
    const int64_t end = begin + kBlock < vocab ? begin + kBlock : vocab;
    for (int64_t i = begin; i < end; ++i) row[i] *= factor;
  }
}

template <bool kWrite, bool kEntropy, bool kSoftcap>
RowSums SumRow(float* row, int64_t vocab, const VocabRowOptions& options) {
  const float inverse_temperature = 1.0F / options.temperature;
  RowSums sums;
  float block_max[kWrite ? kMaxBlocks : 1];
  float capped[kSoftcap ? kBlock : 1];
  for (int64_t begin = 0, block = 0; begin < vocab; begin += kBlock, ++block) {
    const int64_t count = begin + kBlock < vocab ? kBlock : vocab - begin;
    float* logits = row + begin;
    const float max = kSoftcap
                          ? CapBlock(logits, count, options.softcap, capped)
                          : MaxBlock(logits, count);
    if (max > sums.max) Rescale(sums, max, inverse_temperature);
    if constexpr (kWrite) block_max[block] = sums.max;
    ExpBlock<kWrite, kEntropy, kSoftcap> body{
        sums.max, inverse_temperature,
        kSoftcap ? 1.0F / options.softcap : 0.0F};
    const BlockSums part = body.Run(kSoftcap ? capped : logits, count, logits);
    sums.exps += static_cast<double>(part.exps);
    sums.weighted += static_cast<double>(part.weighted);
  }
  if constexpr (kWrite) {
    Normalize(row, vocab, block_max, sums, inverse_temperature);
  }
  return sums;
}

template <bool kWrite, bool kEntropy>
RowSums SumRowOf(float* row, int64_t vocab, const VocabRowOptions& options) {
  return options.softcap > 0
             ? SumRow<kWrite, kEntropy, true>(row, vocab, options)
             : SumRow<kWrite, kEntropy, false>(row, vocab, options);
}

void VocabRow(float* logits, int64_t vocab, const VocabRowOptions& options,
              const int64_t* targets, int64_t num_targets, float* logprobs,
              float* entropy) {
  // Read before the softmax overwrites them.
  for (int64_t i = 0; i < num_targets; ++i) {
    logprobs[i] = SoftcapOne(logits[targets[i]], options.softcap);
  }
  RowSums sums;
  if (options.write_softmax) {
    sums = entropy != nullptr ? SumRowOf<true, true>(logits, vocab, options)
                              : SumRowOf<true, false>(logits, vocab, options);
  } else {
    sums = entropy != nullptr ? SumRowOf<false, true>(logits, vocab, options)
                              : SumRowOf<false, false>(logits, vocab, options);
  }
  const double log_sum = __builtin_log(sums.exps);
  for (int64_t i = 0; i < num_targets; ++i) {
    const double distance = static_cast<double>(logprobs[i]) - sums.max;
    logprobs[i] = static_cast<float>(
        distance / static_cast<double>(options.temperature) - log_sum);
  }
  if (entropy != nullptr) {
    *entropy = static_cast<float>(log_sum - sums.weighted / sums.exps);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_VOCAB_ROWS_BODY_H_
