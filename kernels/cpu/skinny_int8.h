// The sums of skinny products (products of few rows) with weights in 8 bits.
// Compiled only in table_*.cc.
//
// A weight is a product q s (int8_rows.h), which is exact in f32. So an element
// of y has the same bits as with weights that were widened to f32 beforehand.
#ifndef WEFT_KERNELS_CPU_SKINNY_INT8_H_
#define WEFT_KERNELS_CPU_SKINNY_INT8_H_

#include "kernels/cpu/int8_rows_body.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/skinny_product.h"
#include "kernels/cpu/skinny_weights.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Adds the products of kRows rows of x with kSkinnyOutputs rows of the weight
// to `sums`. Reads each scale once for its whole group.
template <int64_t kRows>
WEFT_INLINE void SumTile(const SkinnyProduct& p, const float* x,
                         const int8_t* weight, Fetch& fetch,
                         Vec (&sums)[kRows][kSkinnyOutputs]) {
  float scales[kSkinnyOutputs] = {};
  for (int64_t i = 0; i + kWidth <= p.num_inputs; i += kWidth) {
    fetch.Step();
    if (i % kInt8Group == 0) {
      for (int64_t o = 0; o < kSkinnyOutputs; ++o) {
        scales[o] = Int8Scale(weight + o * p.weight_stride, p.num_inputs, i);
      }
    }
    Vec w[kSkinnyOutputs];
    for (int64_t o = 0; o < kSkinnyOutputs; ++o) {
      w[o] = LoadWeights(weight + o * p.weight_stride + i) * Fill(scales[o]);
    }
    for (int64_t r = 0; r < kRows; ++r) {
      const Vec x_vec = Load(x + r * p.x_stride + i);
      for (int64_t o = 0; o < kSkinnyOutputs; ++o) sums[r][o] += x_vec * w[o];
    }
  }
}

WEFT_INLINE Vec SumRow(const SkinnyProduct& p, const float* x,
                       const int8_t* weight) {
  Vec sum{};
  for (int64_t i = 0; i + kWidth <= p.num_inputs; i += kWidth) {
    const Vec scale = Fill(Int8Scale(weight, p.num_inputs, i));
    sum += Load(x + i) * (LoadWeights(weight + i) * scale);
  }
  return sum;
}

// The number of weight rows that SumOneRow multiplies at a time. Their sums and
// scales fit in the vector registers.
inline constexpr int64_t kInt8Outputs = kWidth == 16 ? 8 : kSkinnyOutputs;

// Adds the products of one row of x with kInt8Outputs rows of the weight. With
// one weight row, each addition would wait for the addition before it (Zen 5,
// from the second-level cache: 29 GB/s with 1 row, 38 with 4, 47 with 8).
// Prefetches the weight rows that follow (two cores, from memory: 58 GB/s with
// 4 rows and 1 KB ahead, 74 with 8 rows and 4 KB ahead).
WEFT_INLINE void SumOneRow(const SkinnyProduct& p, const float* x,
                           const int8_t* weight, Vec (&sums)[kInt8Outputs]) {
  constexpr int64_t kLine = Fetch::kLineBytes;
  const int64_t stride = p.weight_stride;
  const int64_t all = kInt8Outputs * stride;
  const char* next = (const char*)weight + all + kAheadBytes;
  const int64_t whole = p.num_inputs / kWidth * kWidth;
  int64_t fetched = 0;
  for (int64_t begin = 0; begin < whole; begin += kInt8Group) {
    const int64_t end = begin + kInt8Group < whole ? begin + kInt8Group : whole;
    for (int64_t line = 0; line < kInt8Outputs && fetched < all; ++line) {
      __builtin_prefetch(next + fetched);
      fetched += kLine;
    }
    Vec scales[kInt8Outputs];
    for (int64_t o = 0; o < kInt8Outputs; ++o) {
      scales[o] = Fill(Int8Scale(weight + o * stride, p.num_inputs, begin));
    }
    for (int64_t i = begin; i < end; i += kWidth) {
      const Vec x_vec = Load(x + i);
      for (int64_t o = 0; o < kInt8Outputs; ++o) {
        sums[o] += x_vec * (LoadWeights(weight + o * stride + i) * scales[o]);
      }
    }
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_SKINNY_INT8_H_
