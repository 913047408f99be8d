// A tile of a skinny product, a product of few rows. Compiled only in
// table_*.cc.
//
// A tile multiplies kSkinnyOutputs weight rows with a few rows of x. The first
// tile brings the weight rows into the first-level cache, so that they are read
// from memory once for all rows of x. Each element of y has one vector of sums,
// to which the products of the inputs are added in order. So the element's bits
// do not depend on the tile or on other elements.
#ifndef WEFT_KERNELS_CPU_SKINNY_TILE_H_
#define WEFT_KERNELS_CPU_SKINNY_TILE_H_

#include "kernels/cpu/simd.h"
#include "kernels/cpu/skinny_int8.h"
#include "kernels/cpu/skinny_product.h"
#include "kernels/cpu/skinny_weights.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The most rows of x in a tile. The tile's sums, a vector of each weight row
// and a vector of x fit in the vector registers (32 with AVX-512, otherwise
// 16).
inline constexpr int64_t kTileRows = kWidth == 16 ? 6 : 2;

// Returns `sum` plus the products of the inputs from `begin` on, added one by
// one. Uses explicit fused operations, because otherwise the surrounding code
// would decide whether the compiler fuses.
template <typename Weight>
WEFT_INLINE float AddRest(const SkinnyProduct& p, const float* x,
                          const Weight* weight, int64_t begin, float sum) {
  for (int64_t i = begin; i < p.num_inputs; ++i) {
    sum = __builtin_fmaf(x[i], WeightAt(p, weight, i), sum);
  }
  return sum;
}

// Adds the products of kRows rows of x with kSkinnyOutputs rows of the weight
// to `sums`.
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
