// Implements vocab_row of kernels.h. Compiled only in table_*.cc.
//
// The row is processed in blocks that stay in the L1 cache. For each block the
// kernel finds the maximum, and then the exponentials relative to m, the
// largest logit so far. If the block raises m, the sums of earlier blocks are
// rescaled. If the softmax is wanted, the exponentials replace the logits, and
// the kernel keeps the m that it used for each block. At the end, one factor
// per block turns the exponentials into probabilities, so no exponential is
// computed twice. Sums are f32 inside a block and f64 between blocks.
#ifndef WEFT_KERNELS_CPU_VOCAB_ROWS_BODY_H_
#define WEFT_KERNELS_CPU_VOCAB_ROWS_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_math.h"
#include "kernels/cpu/vocab_block.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

inline constexpr int64_t kMaxBlocks = kMaxVocab / kBlock;

// The sums over the blocks so far. `max` is their largest softcapped logit c.
struct RowSums {
  float max = kLowest;
  double exps = 0;      // Sum of e^d with d = (c - max) / temperature.
  double weighted = 0;  // Sum of d e^d, for the entropy.
};

WEFT_INLINE float SoftcapOne(float x, float softcap) {
  if (softcap > 0) CapBlock(&x, 1, softcap, &x);
  return x;
}

// Makes the sums relative to a new maximum.
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

// Scales the exponentials of each block to probabilities.
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
  // Reads the targets before the softmax overwrites them.
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
