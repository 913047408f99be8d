// Implements softmax_row and softmax_gradient_row of kernels.h. Compiled
// only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_ATTENTION_ROWS_BODY_H_
#define WEFT_KERNELS_CPU_ATTENTION_ROWS_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_math.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

WEFT_INLINE int64_t RoundDown(int64_t i) { return i / kWidth * kWidth; }
WEFT_INLINE int64_t RoundUp(int64_t i) { return RoundDown(i + kWidth - 1); }

WEFT_INLINE void FillZeros(float* row, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kWidth) Store(row + i, Vec{});
}

// Lane l of x belongs to key i + l. Returns x with `fill` in the lanes of keys
// that the query does not see.
WEFT_INLINE Vec Seen(const SoftmaxKeys& keys, int64_t i, Vec x, float fill) {
  const IntVec index = LaneNumbers() + static_cast<int32_t>(i);
  const IntVec seen = (index >= static_cast<int32_t>(keys.begin)) &
                      (index < static_cast<int32_t>(keys.end));
  return seen ? x : Fill(fill);
}

WEFT_INLINE Vec Capped(Vec x, float softcap) {
  return softcap > 0 ? softcap * Tanh(x * (1.0F / softcap)) : x;
}

WEFT_ONE_BODY SoftmaxSum SoftmaxRow(const SoftmaxKeys& keys, float softcap,
                                    float* scores) {
  const int64_t first = RoundDown(keys.begin);
  const int64_t last = RoundUp(keys.end);
  if (keys.begin >= keys.end) {
    FillZeros(scores, 0, RoundUp(keys.size));
    return {};
  }
  FillZeros(scores, 0, first);
  FillZeros(scores, last, RoundUp(keys.size));
  Vec best = Fill(-__builtin_inff());
  for (int64_t i = first; i < last; i += kWidth) {
    const Vec x =
        Seen(keys, i, Capped(Load(scores + i), softcap), -__builtin_inff());
    Store(scores + i, x);
    best = Max(best, x);
  }
  const float max = MaxLane(best);
  Vec sum{};
  for (int64_t i = first; i < last; i += kWidth) {
    const Vec weight = Exp(Load(scores + i) - max);
    Store(scores + i, weight);
    sum += weight;
  }
  const float total = Sum(sum);
  return {.factor = 1.0F / total, .lse = max + __builtin_logf(total)};
}

void SoftmaxGradientRow(const SoftmaxKeys& keys, float softcap, float lse,
                        float delta, float* scores, float* dweights) {
  const int64_t first = RoundDown(keys.begin);
  const int64_t last = keys.begin < keys.end ? RoundUp(keys.end) : first;
  FillZeros(scores, 0, first);
  FillZeros(scores, last, RoundUp(keys.size));
  FillZeros(dweights, 0, first);
  FillZeros(dweights, last, RoundUp(keys.size));
  for (int64_t i = first; i < last; i += kWidth) {
    const Vec score = Capped(Load(scores + i), softcap);
    const Vec weight = Seen(keys, i, Exp(score - lse), 0);
    Vec gradient = weight * (Load(dweights + i) - delta);
    if (softcap > 0) {
      const Vec ratio = score * (1.0F / softcap);
      gradient *= 1.0F - ratio * ratio;
    }
    Store(scores + i, weight);
    Store(dweights + i, Seen(keys, i, gradient, 0));
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_ATTENTION_ROWS_BODY_H_
