// Implements copy_panels of kernels.h. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_PANEL_COPY_BODY_H_
#define WEFT_KERNELS_CPU_PANEL_COPY_BODY_H_

#include "kernels/cpu/panel_product.h"
#include "kernels/cpu/panel_product_body.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// A 4 x 4 block of a matrix, by rows.
struct Square {
  Quad row[4];
};

WEFT_INLINE Square LoadSquare(const float* p, int64_t stride) {
  return {{LoadQuad(p), LoadQuad(p + stride), LoadQuad(p + 2 * stride),
           LoadQuad(p + 3 * stride)}};
}

WEFT_INLINE void StoreSquare(float* p, int64_t stride, const Square& s) {
  for (int64_t i = 0; i < 4; ++i) StoreQuad(p + i * stride, s.row[i]);
}

WEFT_INLINE Square Transpose(const Square& s) {
  const Quad ab_low = __builtin_shufflevector(s.row[0], s.row[1], 0, 4, 1, 5);
  const Quad ab_high = __builtin_shufflevector(s.row[0], s.row[1], 2, 6, 3, 7);
  const Quad cd_low = __builtin_shufflevector(s.row[2], s.row[3], 0, 4, 1, 5);
  const Quad cd_high = __builtin_shufflevector(s.row[2], s.row[3], 2, 6, 3, 7);
  return {{__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
           __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
           __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
           __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)}};
}

// Copies `columns` columns of a matrix to a panel of `width` columns, and fills
// the panel's other columns with zeros. The elements of each matrix row are
// adjacent.
void CopyRows(const PanelCopy& copy, const float* from, int64_t columns,
              int64_t width, float* to) {
  for (int64_t k = 0; k < copy.num_terms; ++k) {
    int64_t n = 0;
    for (; n + 4 <= columns; n += 4) StoreQuad(to + n, LoadQuad(from + n));
    for (; n < columns; ++n) to[n] = from[n];
    for (; n < width; ++n) to[n] = 0;
    from += copy.k_stride;
    to += width;
  }
}

// Copies the terms [begin, end) of four columns of a matrix. The elements of
// each column are adjacent. `columns` is the number of columns left to copy,
// and may be negative. If fewer than 4 are left, zeros replace the missing
// columns.
WEFT_INLINE void CopyFourColumns(const PanelCopy& copy, const float* from,
                                 int64_t columns, int64_t begin, int64_t end,
                                 int64_t width, float* to) {
  int64_t k = begin;
  if (columns >= 4) {
    for (; k + 4 <= end; k += 4) {
      StoreSquare(to + k * width, width,
                  Transpose(LoadSquare(from + k, copy.n_stride)));
    }
  }
  for (; k < end; ++k) {
    Quad quad = {};
    for (int64_t n = 0; n < Smaller(columns, 4); ++n) {
      quad[n] = from[n * copy.n_stride + k];
    }
    StoreQuad(to + k * width, quad);
  }
}

// Does what CopyRows does, for a matrix in which the elements of each column
// are adjacent. Reads one cache line of each column at a time, because lines of
// different columns may evict each other from the cache. Prefetches later
// lines, because the hardware does not prefetch so many columns. On Zen 5, with
// the adapters' weights in memory, the copies take 2.2 % of a step without
// prefetches, and 1.6 % with prefetches.
void CopyColumns(const PanelCopy& copy, const float* from, int64_t columns,
                 int64_t width, float* to) {
  constexpr int64_t kLine = 16;
  for (int64_t begin = 0; begin < copy.num_terms; begin += kLine) {
    const int64_t end = Smaller(begin + kLine, copy.num_terms);
    for (int64_t n = 0; n < columns; ++n) {
      __builtin_prefetch(from + n * copy.n_stride + begin + 2 * kLine);
    }
    for (int64_t n = 0; n < width; n += 4) {
      CopyFourColumns(copy, from + n * copy.n_stride, columns - n, begin, end,
                      width, to + n);
    }
  }
}

void CopyPanels(const PanelCopy& copy) {
  for (int64_t n = 0; n < copy.num_columns; n += kPanelColumns) {
    const int64_t columns = Smaller(copy.num_columns - n, kPanelColumns);
    const int64_t width = (columns + kWidth - 1) / kWidth * kWidth;
    float* to = copy.panels + n * copy.num_terms;
    if (copy.n_stride == 1) {
      CopyRows(copy, copy.from_KN + n, columns, width, to);
    } else {
      CopyColumns(copy, copy.from_KN + n * copy.n_stride, columns, width, to);
    }
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_PANEL_COPY_BODY_H_
