// Implements panel_product of kernels.h. Compiled only in table_*.cc.
//
// The right matrix is cut into panels of up to kPanelColumns columns, and the
// left matrix into tiles of up to 8 rows.
// Source: Goto and van de Geijn 2008; Van Zee and van de Geijn 2015 (BLIS).
#ifndef WEFT_KERNELS_CPU_PANEL_PRODUCT_BODY_H_
#define WEFT_KERNELS_CPU_PANEL_PRODUCT_BODY_H_

#include "kernels/cpu/panel_product.h"
#include "kernels/cpu/panel_tile.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The K terms of each sum are cut into parts of this size. The terms of a part
// are summed one after another, and then the sums of the parts are added. This
// keeps rounding errors small for any number of terms. With
// PanelProduct::in_order a sum goes on from part to part.
inline constexpr int64_t kPartTerms = 384;

// Multiplies all rows, tile by tile, with a part of one panel.
template <int64_t kVectors, bool kPadded>
void PanelTiles(const PanelProduct& p, const PanelPart& part) {
  constexpr int64_t kMost = kPanelRows<kVectors>;
  int64_t row = 0;
  for (; row + kMost <= p.num_rows; row += kMost) {
    PanelTile<kMost, kVectors, kPadded>(p, part, row);
  }
  if (row + 4 <= p.num_rows) {
    PanelTile<4, kVectors, kPadded>(p, part, row);
    row += 4;
  }
  switch (p.num_rows - row) {
    case 3:
      return PanelTile<3, kVectors, kPadded>(p, part, row);
    case 2:
      return PanelTile<2, kVectors, kPadded>(p, part, row);
    case 1:
      return PanelTile<1, kVectors, kPadded>(p, part, row);
    default:
      return;
  }
}

template <int64_t kVectors>
void RunPanel(const PanelProduct& p, const PanelPart& part) {
  if (p.right_stride == 0 || part.last_count == kWidth) {
    PanelTiles<kVectors, true>(p, part);
  } else {
    PanelTiles<kVectors, false>(p, part);
  }
}

// Multiplies all rows with one part of a panel. The panel begins at `column`,
// and the part begins at `term`.
WEFT_INLINE void RunPart(const PanelProduct& p, int64_t term, int64_t column) {
  const int64_t columns = Smaller(p.num_columns - column, kPanelColumns);
  const int64_t vectors = (columns + kWidth - 1) / kWidth;
  PanelPart part{.right = p.right_KN + term * p.right_stride + column,
                 .right_stride = p.right_stride,
                 .first_term = term,
                 .num_terms = Smaller(p.num_terms - term, kPartTerms),
                 .first_column = column,
                 .last_count = columns - (vectors - 1) * kWidth};
  if (p.right_stride == 0) {
    part.right_stride = vectors * kWidth;
    part.right = p.right_KN + column * p.num_terms + term * part.right_stride;
  }
  if (vectors == 3) {
    RunPanel<3>(p, part);
  } else if (vectors == 2) {
    RunPanel<2>(p, part);
  } else {
    RunPanel<1>(p, part);
  }
}

// Rows are cut into blocks of this size, so that a part of a block stays in the
// second-level cache while it is multiplied with all panels.
inline constexpr int64_t kBlockRows = 96;

void RunPanelProduct(const PanelProduct& p) {
  for (int64_t term = 0; term < p.num_terms; term += kPartTerms) {
    for (int64_t row = 0; row < p.num_rows; row += kBlockRows) {
      PanelProduct block = p;
      block.left_MK += row * p.m_stride;
      block.out_MN += row * p.out_stride;
      block.num_rows = Smaller(kBlockRows, p.num_rows - row);
      for (int64_t n = 0; n < p.num_columns; n += kPanelColumns) {
        RunPart(block, term, n);
      }
    }
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_PANEL_PRODUCT_BODY_H_
