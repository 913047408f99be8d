// The sums of skinny products with weights in 8 bits. Part of table_*.cc.
//
// A weight q s is computed in a register, exactly, so an element of y has the
// bits of the product in f32 with the widened weight.
#ifndef WEFT_KERNELS_CPU_SKINNY_INT8_H_
#define WEFT_KERNELS_CPU_SKINNY_INT8_H_

#include "kernels/cpu/int8_rows_body.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/skinny_product.h"
#include "kernels/cpu/skinny_weights.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// As for the other types; scales are read once for every group.
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

// The rows of the weight that are summed with a single row of x together. Their
// sums and scales fit the registers.
inline constexpr int64_t kInt8Outputs = kWidth == 16 ? 8 : kSkinnyOutputs;

// Sums one row of x with kInt8Outputs rows of the weight together, because the
// sums of one row alone wait for each other (Zen 5: 29 GB/s from the
// second-level cache, 38 with 4 rows, 47 with 8). Prefetches the memory that
// follows (two cores: 58 GB/s from memory with 4 rows and 1 KB ahead, 74 with 8
// rows and 4 KB).
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
