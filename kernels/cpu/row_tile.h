// A tile of a row product: a few rows of x with kRowOutputs rows of a weight.
// Compiled only in table_*.cc.
//
// Each element of y has one vector of sums, to which the products of a part of
// the inputs are added in order. Then the lanes are added, and the sums of the
// parts. This order is the same in tiles of any size, so the element's bits do
// not depend on the tile or on other elements.
#ifndef WEFT_KERNELS_CPU_ROW_TILE_H_
#define WEFT_KERNELS_CPU_ROW_TILE_H_

#include "kernels/cpu/quads.h"
#include "kernels/cpu/row_product.h"
#include "kernels/cpu/row_weights.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The most rows of x in a tile. The tile's sums, and the vectors that they
// read, fit in the vector registers (32 with AVX-512, otherwise 16).
inline constexpr int64_t kTileRows = kWidth == 16 ? 6 : 3;

// The rows of x of a tile, at the first input of a part. The vector of inputs
// [i, i + kWidth) of row r is at data + r * row_stride + i / kWidth * step.
struct TileRows {
  const float* data;
  int64_t row_stride;
  int64_t step;
};

// Adds the products of the first `inputs` inputs, a multiple of kWidth, to
// `sums`. Meanwhile prefetches.
template <int64_t kRows, typename Weight, typename Prefetch>
WEFT_INLINE void SumTile(const TileRows& x, WeightRows<Weight> weight,
                         int64_t inputs, Prefetch& fetch,
                         Vec (&sums)[kRows][kRowOutputs]) {
  const float* from = x.data;
  for (int64_t i = 0; i < inputs; i += kWidth, from += x.step) {
    fetch.Step();
    weight.Enter(i);
    // The fewer of the two operands stay in registers.
    if constexpr (kWidth == 16) {
      Vec w[kRowOutputs];
      WEFT_UNROLL
      for (int64_t o = 0; o < kRowOutputs; ++o) w[o] = weight.At(o, i);
      WEFT_UNROLL
      for (int64_t r = 0; r < kRows; ++r) {
        const Vec a = Load(from + r * x.row_stride);
        WEFT_UNROLL
        for (int64_t o = 0; o < kRowOutputs; ++o) {
          sums[r][o] = MultiplyAdd(a, w[o], sums[r][o]);
        }
      }
    } else {
      Vec a[kRows];
      WEFT_UNROLL
      for (int64_t r = 0; r < kRows; ++r) a[r] = Load(from + r * x.row_stride);
      WEFT_UNROLL
      for (int64_t o = 0; o < kRowOutputs; ++o) {
        const Vec w = weight.At(o, i);
        WEFT_UNROLL
        for (int64_t r = 0; r < kRows; ++r) {
          sums[r][o] = MultiplyAdd(a[r], w, sums[r][o]);
        }
      }
    }
  }
}

// Returns the sums of kQuads rows, from `first` on. Takes the last row in place
// of rows that are missing.
template <int64_t kRows>
WEFT_INLINE Vec SumRows(const Vec (&sums)[kRows][kRowOutputs], int64_t first) {
  Vec rows[kRowOutputs][kQuads];
  WEFT_UNROLL
  for (int64_t o = 0; o < kRowOutputs; ++o) {
    for (int64_t q = 0; q < kQuads; ++q) {
      rows[o][q] = sums[Smaller(first + q, kRows - 1)][o];
    }
  }
  return SumQuads(rows);
}

// Computes a tile's sums over a part of the inputs, and adds them to the sums
// of earlier parts, or overwrites these if `is_first`. The kRowOutputs sums of
// row r are at totals + r * stride.
template <int64_t kRows, typename Weight, typename Prefetch>
void Tile(const TileRows& x, const WeightRows<Weight>& weight, int64_t inputs,
          Prefetch& fetch, bool is_first, float* totals, int64_t stride) {
  Vec sums[kRows][kRowOutputs] = {};
  SumTile<kRows>(x, weight, inputs, fetch, sums);
  Quads rows;
  WEFT_UNROLL
  for (int64_t r = 0; r < kRows; ++r) {
    if (r % kQuads == 0) rows = SplitToQuads(SumRows(sums, r));
    Quad sum = rows.part[r % kQuads];
    if (!is_first) sum = LoadQuad(totals + r * stride) + sum;
    StoreQuad(totals + r * stride, sum);
  }
}

// Runs a tile of `rows` rows, at most kTileRows.
template <typename Weight, typename Prefetch>
WEFT_INLINE void RunTile(int64_t rows, const TileRows& x,
                         const WeightRows<Weight>& weight, int64_t inputs,
                         Prefetch& fetch, bool is_first, float* totals,
                         int64_t stride) {
  switch (rows) {
    case 1:
      return Tile<1>(x, weight, inputs, fetch, is_first, totals, stride);
    case 2:
      return Tile<2>(x, weight, inputs, fetch, is_first, totals, stride);
#if defined(__AVX512F__)
    case 3:
      return Tile<3>(x, weight, inputs, fetch, is_first, totals, stride);
    case 4:
      return Tile<4>(x, weight, inputs, fetch, is_first, totals, stride);
    case 5:
      return Tile<5>(x, weight, inputs, fetch, is_first, totals, stride);
#endif
    default:
      return Tile<kTileRows>(x, weight, inputs, fetch, is_first, totals,
                             stride);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_ROW_TILE_H_
