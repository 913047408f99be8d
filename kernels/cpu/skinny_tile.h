// A tile of a skinny product. Part of table_*.cc.
//
// A tile multiplies kSkinnyOutputs weight rows with a few rows of x. The first
// tile brings the weight rows into the first-level cache, so that they are read
// from memory once for all rows of x. Each element of y has one vector of sums
// over the inputs in order, so it does not depend on the tile or on other
// elements.
#ifndef WEFT_KERNELS_CPU_SKINNY_TILE_H_
#define WEFT_KERNELS_CPU_SKINNY_TILE_H_

#include "kernels/cpu/simd.h"
#include "kernels/cpu/skinny_product.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The number of rows of x in a tile. The tile's sums, the weights and one x fit
// the registers: 32, or 16 before AVX-512.
inline constexpr int64_t kTileRows = kWidth == 16 ? 6 : 2;

typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));
typedef uint32_t BitsVec __attribute__((vector_size(kWidth * 4)));

WEFT_INLINE Vec LoadWeights(const float* p) { return Load(p); }

// bf16 is the upper half of an f32.
WEFT_INLINE Vec LoadWeights(const uint16_t* p) {
  HalfVec half;
  __builtin_memcpy(&half, p, sizeof(half));
  return (Vec)(__builtin_convertvector(half, BitsVec) << 16);
}

WEFT_INLINE float LoadWeight(const float* p) { return *p; }

WEFT_INLINE float LoadWeight(const uint16_t* p) {
  return __builtin_bit_cast(float, uint32_t{*p} << 16);
}

// Adds the products from input `begin` on, one by one. It uses explicit fused
// operations, because whether the compiler fuses depends on the surrounding
// code.
template <typename Weight>
WEFT_INLINE float AddRest(const SkinnyProduct& p, const float* x,
                          const Weight* weight, int64_t begin, float sum) {
  for (int64_t i = begin; i < p.num_inputs; ++i) {
    sum = __builtin_fmaf(x[i], LoadWeight(weight + i), sum);
  }
  return sum;
}

// Prefetches the next memory line by line, in the order of addresses, so that
// the hardware prefetcher follows. By itself the hardware does not follow four
// parallel rows (Zen 4, one core: 13 of 30 GB/s). The lines go to the
// second-level cache, because x fills the first.
struct Fetch {
  static constexpr int64_t kLineBytes = 64;
  const char* at;
  const char* end;
  int64_t step_bytes;  // Bytes that one Step prefetches.

  WEFT_INLINE void Step() {
    const char* stop = end - at < step_bytes ? end : at + step_bytes;
    for (; at < stop; at += kLineBytes) __builtin_prefetch(at, 0, 2);
  }
};

// Adds the products of kRows rows of x with kSkinnyOutputs rows of the weight.
template <typename Weight, int64_t kRows>
WEFT_INLINE void SumTile(const SkinnyProduct& p, const float* x,
                         const Weight* weight, Fetch& fetch,
                         Vec (&sums)[kRows][kSkinnyOutputs]) {
  for (int64_t i = 0; i + kWidth <= p.num_inputs; i += kWidth) {
    fetch.Step();
    Vec w[kSkinnyOutputs];
    for (int64_t o = 0; o < kSkinnyOutputs; ++o) {
      w[o] = LoadWeights(weight + o * p.weight_stride + i);
    }
    for (int64_t r = 0; r < kRows; ++r) {
      const Vec x_vec = Load(x + r * p.x_stride + i);
      for (int64_t o = 0; o < kSkinnyOutputs; ++o) sums[r][o] += x_vec * w[o];
    }
  }
}

// Computes kSkinnyOutputs elements of a row of y from their vectors of sums,
// and writes them.
template <typename Weight>
WEFT_INLINE void WriteOutputs(const SkinnyProduct& p, const Weight* weight,
                              int64_t row, int64_t output, const Vec* sums) {
  Quad sum = SumEach(sums[0], sums[1], sums[2], sums[3]);
  const int64_t whole = p.num_inputs / kWidth * kWidth;
  if (whole < p.num_inputs) {
    for (int64_t o = 0; o < kSkinnyOutputs; ++o) {
      sum[o] = AddRest(p, p.x_BI + row * p.x_stride,
                       weight + o * p.weight_stride, whole, sum[o]);
    }
  }
  float* y = p.y_BO + row * p.y_stride + output;
  sum *= p.scale;
  if (p.bias_O != nullptr) sum += LoadQuad(p.bias_O + output);
  if (p.adds) sum += LoadQuad(y);
  StoreQuad(y, sum);
}

template <typename Weight, int64_t kRows>
void Tile(const SkinnyProduct& p, const Weight* weight, Fetch& fetch,
          int64_t row, int64_t output) {
  Vec sums[kRows][kSkinnyOutputs] = {};
  SumTile(p, p.x_BI + row * p.x_stride, weight, fetch, sums);
  for (int64_t r = 0; r < kRows; ++r) {
    WriteOutputs(p, weight, row + r, output, sums[r]);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_SKINNY_TILE_H_
