// One block of a row of logits: its maximum, its exponentials and their sums.
// Implements softcap_row, max_block and weigh_block of kernels.h. Compiled only
// in table_*.cc.
#ifndef WEFT_KERNELS_CPU_VOCAB_BLOCK_H_
#define WEFT_KERNELS_CPU_VOCAB_BLOCK_H_

#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_math.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The number of logits in a block.
inline constexpr int64_t kBlock = 4096;
inline constexpr float kLowest = -3.402823466e+38F;

struct BlockSums {
  float exps;
  float weighted;
};

// Writes the softcapped logits of a block, and returns their maximum. `capped`
// may be x.
WEFT_ONE_BODY float CapBlock(const float* x, int64_t count, float softcap,
                             float* capped) {
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

// Computes the exponentials of one block and their sums.
template <bool kWrite, bool kEntropy, bool kSoftcap>
struct ExpBlock {
  float max;
  float inverse_temperature;
  float inverse_softcap;
  Vec exps[kUnroll] = {};
  Vec weighted[kUnroll] = {};

  // Adds e^d to exps[u], and d e^d to weighted[u] for the entropy, where d =
  // (c - max) * inverse_temperature. `c` holds logits after the softcap.
  // Returns e^d times the softcap's derivative.
  WEFT_INLINE Vec Add(Vec c, int64_t u) {
    const Vec d = (c - max) * inverse_temperature;
    const Vec e = Exp(d);
    exps[u] += e;
    if constexpr (kEntropy) {
      // Leaves out terms with e = 0, because d may be -inf, and -inf * 0 is
      // NaN.
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

float WeighBlock(const float* logits, int64_t count, float max, float factor,
                 float* weights) {
  ExpBlock<true, false, false> body{max, factor, 0};
  return body.Run(logits, count, weights).exps;
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_VOCAB_BLOCK_H_
