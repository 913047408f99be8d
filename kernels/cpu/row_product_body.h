// Implements row_product of kernels.h. Compiled only in table_*.cc.
//
// A tile has a few rows of y and a block of outputs. Its sums stay in registers
// while the products of the inputs are added in order. This order is the same
// in tiles of any size, so the bits of an element of y do not depend on the
// size.
#ifndef WEFT_KERNELS_CPU_ROW_PRODUCT_BODY_H_
#define WEFT_KERNELS_CPU_ROW_PRODUCT_BODY_H_

#include "kernels/cpu/simd.h"
#include "kernels/cpu/skinny_product.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The size of the largest tile, in vectors of outputs and in rows. Its sums,
// kBlockVectors weight vectors and one x fit in the vector registers (32 with
// AVX-512, otherwise 16).
inline constexpr int64_t kBlockVectors = kWidth == 16 ? 4 : 2;
inline constexpr int64_t kBlockRows = kWidth == 16 ? 6 : 4;

// The inputs are cut into parts of this size. The inputs of a part are summed
// one after another, and then the sums of the parts are added. This keeps
// rounding errors small for any number of inputs.
inline constexpr int64_t kPartInputs = 512;

// Adds the products of the inputs [begin, end) to kRows rows of y, for kVectors
// vectors of outputs from `output` on. Overwrites y if `begin` is 0. If `count`
// < kWidth, there is one vector, and only its first `count` outputs exist.
template <int64_t kRows, int64_t kVectors>
WEFT_INLINE void RowPart(const RowProduct& p, int64_t row, int64_t output,
                         int64_t count, int64_t begin, int64_t end) {
  Vec sums[kRows][kVectors] = {};
  const float* x = p.x_BI + row * p.x_stride;
  const float* weight = p.weight_IO + begin * p.weight_stride + output;
  for (int64_t i = begin; i < end; ++i) {
    Vec w[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) {
      w[v] = count < kWidth ? LoadPart(weight, count, 0)
                            : Load(weight + v * kWidth);
    }
    for (int64_t r = 0; r < kRows; ++r) {
      const Vec x_vec = Fill(x[r * p.x_stride + i]);
      for (int64_t v = 0; v < kVectors; ++v) sums[r][v] += x_vec * w[v];
    }
    weight += p.weight_stride;
  }
  for (int64_t r = 0; r < kRows; ++r) {
    float* y = p.y_BO + (row + r) * p.y_stride + output;
    for (int64_t v = 0; v < kVectors; ++v, y += kWidth) {
      if (count < kWidth) {
        const Vec before = begin == 0 ? Vec{} : LoadPart(y, count, 0);
        StorePart(y, before + sums[r][v], count);
      } else {
        Store(y, begin == 0 ? sums[r][v] : Load(y) + sums[r][v]);
      }
    }
  }
}

template <int64_t kRows, int64_t kVectors>
void RowTile(const RowProduct& p, int64_t row, int64_t output, int64_t count) {
  int64_t begin = 0;
  do {
    const int64_t left = p.num_inputs - begin;
    const int64_t end = begin + (left < kPartInputs ? left : kPartInputs);
    RowPart<kRows, kVectors>(p, row, output, count, begin, end);
    begin = end;
  } while (begin < p.num_inputs);
}

// Computes kVectors vectors of outputs for all rows, tile by tile.
template <int64_t kVectors>
void RowTiles(const RowProduct& p, int64_t output, int64_t count) {
  int64_t row = 0;
  for (; row + kBlockRows <= p.num_rows; row += kBlockRows) {
    RowTile<kBlockRows, kVectors>(p, row, output, count);
  }
  for (; row + 2 <= p.num_rows; row += 2) {
    RowTile<2, kVectors>(p, row, output, count);
  }
  if (row < p.num_rows) RowTile<1, kVectors>(p, row, output, count);
}

void RunRowProduct(const RowProduct& p) {
  constexpr int64_t kBlock = kBlockVectors * kWidth;
  int64_t o = p.begin;
  for (; o + kBlock <= p.end; o += kBlock) {
    RowTiles<kBlockVectors>(p, o, kWidth);
  }
  for (; o + kWidth <= p.end; o += kWidth) RowTiles<1>(p, o, kWidth);
  if (o < p.end) RowTiles<1>(p, o, p.end - o);
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_ROW_PRODUCT_BODY_H_
