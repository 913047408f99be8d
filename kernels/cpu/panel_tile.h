// Multiplies a tile (a few rows of the left matrix) with a panel of the right
// matrix. Compiled only in table_*.cc.
//
// The sums stay in registers while the terms are added in order. This order is
// the same in tiles of any size, so the bits of an element do not depend on the
// size.
#ifndef WEFT_KERNELS_CPU_PANEL_TILE_H_
#define WEFT_KERNELS_CPU_PANEL_TILE_H_

#include "kernels/cpu/panel_product.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

inline constexpr int64_t kPanelVectors = 3;
inline constexpr int64_t kPanelColumns = kPanelVectors * kWidth;

// The number of rows of the largest tile. Its sums, a row of the panel and an
// element of the left matrix fit in the vector registers (32 with AVX-512,
// otherwise 16).
template <int64_t kVectors>
inline constexpr int64_t kPanelRows = kWidth == 16 || kVectors == 1 ? 8 : 4;

// A part of the terms of one panel.
struct PanelPart {
  const float* right;    // The row of the panel for first_term.
  int64_t right_stride;  // Floats from one row of the panel to the next.
  int64_t first_term;
  int64_t num_terms;
  int64_t first_column;
  int64_t last_count;  // Columns of the last vector, at most kWidth.
};

inline constexpr int64_t kLinePart = 16;  // Floats of a cache line.

// Computes the sums of kRows rows. Meanwhile prefetches the rows of the next
// tile, because the hardware does not predict addresses that are a row apart.
// If kPadded, reads the whole last vector of the panel; otherwise reads only
// the first `last_count` columns of that vector.
template <int64_t kRows, int64_t kVectors, bool kPadded>
WEFT_INLINE void SumPanel(const PanelProduct& p, const PanelPart& part,
                          int64_t row, Vec (&sums)[kRows][kVectors]) {
  const float* left[kRows];
  WEFT_UNROLL
  for (int64_t r = 0; r < kRows; ++r) {
    left[r] = p.left_MK + (row + r) * p.m_stride + part.first_term * p.k_stride;
  }
  const float* right = part.right;
  for (int64_t k = 0; k < part.num_terms; ++k) {
    Vec b[kVectors];
    WEFT_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) {
      b[v] = kPadded || v + 1 < kVectors
                 ? Load(right + v * kWidth)
                 : LoadPart(right + v * kWidth, part.last_count, 0);
    }
    if (k % kLinePart == 0) {
      WEFT_UNROLL
      for (int64_t r = 0; r < kRows; ++r) {
        __builtin_prefetch(left[r] + k * p.k_stride + kRows * p.m_stride);
      }
    }
    WEFT_UNROLL
    for (int64_t r = 0; r < kRows; ++r) {
      const Vec a = Fill(left[r][k * p.k_stride]);
      WEFT_UNROLL
      for (int64_t v = 0; v < kVectors; ++v) {
        sums[r][v] = MultiplyAdd(a, b[v], sums[r][v]);
      }
    }
    right += part.right_stride;
  }
}

template <int64_t kRows, int64_t kVectors, bool kPadded>
void PanelTile(const PanelProduct& p, const PanelPart& part, int64_t row) {
  Vec sums[kRows][kVectors] = {};
  float* out = p.out_MN + row * p.out_stride + part.first_column;
  const auto count_of = [&](int64_t v) {
    return v + 1 == kVectors ? part.last_count : kWidth;
  };
  const bool adds = p.adds || part.first_term > 0;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      __builtin_prefetch(out + (kRows + r) * p.out_stride + v * kWidth, 1);
    }
  }
  if (adds && p.in_order) {
    WEFT_UNROLL
    for (int64_t r = 0; r < kRows; ++r) {
      WEFT_UNROLL
      for (int64_t v = 0; v < kVectors; ++v) {
        sums[r][v] =
            LoadFirst(out + r * p.out_stride + v * kWidth, count_of(v));
      }
    }
  }
  SumPanel<kRows, kVectors, kPadded>(p, part, row, sums);
  WEFT_UNROLL
  for (int64_t r = 0; r < kRows; ++r) {
    WEFT_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) {
      float* const to = out + r * p.out_stride + v * kWidth;
      Vec result = sums[r][v];
      if (!p.in_order) {
        const Vec before = adds ? LoadFirst(to, count_of(v)) : Vec{};
        result = MultiplyAdd(Fill(p.scale), result, before);
      }
      StoreFirst(to, result, count_of(v));
    }
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_PANEL_TILE_H_
