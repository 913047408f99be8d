// Implements skinny_product_f32, _bf16 and _int8 of kernels.h, tile by tile.
// Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_SKINNY_PRODUCT_BODY_H_
#define WEFT_KERNELS_CPU_SKINNY_PRODUCT_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/skinny_tile.h"
#include "kernels/cpu/skinny_weights.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Cuts the rows of x into tiles of nearly equal size, and multiplies each tile
// with kSkinnyOutputs rows of the weight. Meanwhile prefetches later rows of
// the weight: as many bytes as `next_rows` rows have.
template <typename Weight>
WEFT_INLINE void RunTiles(const SkinnyProduct& p, const Weight* weight,
                          int64_t next_rows, int64_t output) {
  const int64_t num_tiles = (p.num_rows + kTileRows - 1) / kTileRows;
  const int64_t num_steps = num_tiles * (p.num_inputs / kWidth + 1);
  // Four weight rows in bf16 or 8 bits are multiplied too fast to hide the
  // latency of memory, so their prefetches are further ahead.
  constexpr int64_t kAhead = sizeof(Weight) < sizeof(float) ? kAheadBytes : 0;
  const char* next =
      (const char*)(weight + kSkinnyOutputs * p.weight_stride) + kAhead;
  const int64_t next_bytes =
      next_rows * p.weight_stride * int64_t{sizeof(Weight)};
  Fetch fetch{.at = next, .end = next + next_bytes};
  fetch.step_bytes = (fetch.end - fetch.at + num_steps - 1) / num_steps;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = p.num_rows * tile / num_tiles;
    switch (p.num_rows * (tile + 1) / num_tiles - row) {
      case 1:
        Tile<Weight, 1>(p, weight, fetch, row, output);
        break;
      case 2:
        Tile<Weight, 2>(p, weight, fetch, row, output);
        break;
#if defined(__AVX512F__)
      case 3:
        Tile<Weight, 3>(p, weight, fetch, row, output);
        break;
      case 4:
        Tile<Weight, 4>(p, weight, fetch, row, output);
        break;
      case 5:
        Tile<Weight, 5>(p, weight, fetch, row, output);
        break;
      default:
        Tile<Weight, kTileRows>(p, weight, fetch, row, output);
#endif
    }
  }
}

// Returns a vector whose lanes add up to the dot product of a row of x and a
// row of the weight. Leaves out the elements after the last whole vector.
template <typename Weight>
WEFT_INLINE Vec SumRow(const SkinnyProduct& p, const float* x,
                       const Weight* weight) {
  Vec sum{};
  for (int64_t i = 0; i + kWidth <= p.num_inputs; i += kWidth) {
    __builtin_prefetch((const char*)(weight + i) + kAheadBytes);
    sum += Load(x + i) * LoadWeights(weight + i);
  }
  return sum;
}

// Multiplies a single row of x with kSkinnyOutputs rows of the weight, one
// after another. For a single row of x, this is faster than a tile, which reads
// the weight rows in parallel.
template <typename Weight>
WEFT_INLINE void RunOneRow(const SkinnyProduct& p, const Weight* weight,
                           int64_t output) {
  Vec sums[kSkinnyOutputs];
  for (int64_t o = 0; o < kSkinnyOutputs; ++o) {
    sums[o] = SumRow(p, p.x_BI, weight + o * p.weight_stride);
  }
  WriteOutputs(p, weight, 0, output, sums);
}

// If x has a single row, computes outputs with SumOneRow, kInt8Outputs at a
// time. Returns the first output that is left.
WEFT_INLINE int64_t RunFirstOutputs(const SkinnyProduct& p,
                                    const int8_t* weight) {
  int64_t o = p.begin;
  if (p.num_rows > 1) return o;
  for (; o + kInt8Outputs <= p.end; o += kInt8Outputs) {
    Vec sums[kInt8Outputs] = {};
    SumOneRow(p, p.x_BI, weight + o * p.weight_stride, sums);
    for (int64_t part = 0; part < kInt8Outputs; part += kSkinnyOutputs) {
      WriteOutputs(p, weight + (o + part) * p.weight_stride, 0, o + part,
                   sums + part);
    }
  }
  return o;
}

template <typename Weight>
WEFT_INLINE int64_t RunFirstOutputs(const SkinnyProduct& p, const Weight*) {
  return p.begin;
}

template <typename Weight>
void RunSkinnyProduct(const SkinnyProduct& p, const Weight* weight) {
  int64_t o = RunFirstOutputs(p, weight);
  for (; o + kSkinnyOutputs <= p.end; o += kSkinnyOutputs) {
    const Weight* rows = weight + o * p.weight_stride;
    const int64_t rest = p.end - o - kSkinnyOutputs;
    if (p.num_rows == 1) {
      RunOneRow(p, rows, o);
    } else {
      RunTiles(p, rows, rest < kSkinnyOutputs ? rest : kSkinnyOutputs, o);
    }
  }
  for (; o < p.end; ++o) {
    const Weight* weight_I = weight + o * p.weight_stride;
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const float* x_I = p.x_BI + row * p.x_stride;
      float sum = AddRest(p, x_I, weight_I, p.num_inputs / kWidth * kWidth,
                          Sum(SumRow(p, x_I, weight_I)));
      float& y = p.y_BO[row * p.y_stride + o];
      sum *= p.scale;
      if (p.bias_O != nullptr) sum += p.bias_O[o];
      y = p.adds ? sum + y : sum;
    }
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_SKINNY_PRODUCT_BODY_H_
