// Small dense steps of a chunk of the gated delta rule. Compiled only in
// table_*.cc. Legend: that of gated_delta.h.
#ifndef WEFT_KERNELS_CPU_DELTA_SOLVE_BODY_H_
#define WEFT_KERNELS_CPU_DELTA_SOLVE_BODY_H_

#include "kernels/cpu/delta_mix_body.h"
#include "kernels/cpu/gated_delta.h"
#include "kernels/cpu/panel_copy_body.h"
#include "kernels/cpu/panel_product_body.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_math.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Rows of matrices [C, C] of a chunk have this stride.
inline constexpr int64_t kScoreStride = kDeltaChunkRows;

// A matrix whose element (m, n) is at m * row + n * column.
struct Operand {
  const float* data;
  int64_t row;
  int64_t column = 1;
};

// The sizes of a product [M, K] [K, N].
struct ProductSize {
  int64_t rows;
  int64_t terms;
  int64_t columns;
};

// Computes out = left right, or adds it to out. Copies `right` to `panels`.
WEFT_INLINE void Multiply(const Operand& left, const Operand& right,
                          const ProductSize& size, float* panels, bool adds,
                          float* out, int64_t out_stride, float scale = 1) {
  CopyPanels({.from_KN = right.data,
              .k_stride = right.row,
              .n_stride = right.column,
              .num_terms = size.terms,
              .num_columns = size.columns,
              .panels = panels});
  RunPanelProduct({.left_MK = left.data,
                   .m_stride = left.row,
                   .k_stride = left.column,
                   .right_KN = panels,
                   .num_rows = size.rows,
                   .num_terms = size.terms,
                   .num_columns = size.columns,
                   .scale = scale,
                   .adds = adds,
                   .out_MN = out,
                   .out_stride = out_stride});
}

// Writes y = factor x, or adds it to y.
WEFT_INLINE void ScaleRow(const float* x, float factor, int64_t count,
                          bool adds, float* y) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t rest = count - i;
    const Vec before = adds ? LoadUpTo(y + i, rest) : Vec{};
    StoreUpTo(y + i, MultiplyAdd(Fill(factor), LoadUpTo(x + i, rest), before),
              rest);
  }
}

WEFT_INLINE float Dot(const float* x, const float* y, int64_t count) {
  Vec sums[2] = {};
  for (int64_t i = 0; i < count; i += 2 * kWidth) {
    sums[0] += LoadUpTo(x + i, count - i) * LoadUpTo(y + i, count - i);
    if (const int64_t rest = count - i - kWidth; rest > 0) {
      sums[1] +=
          LoadUpTo(x + i + kWidth, rest) * LoadUpTo(y + i + kWidth, rest);
    }
  }
  return Sum(sums[0] + sums[1]);
}

WEFT_INLINE void CopyRowsTo(const float* from, int64_t from_stride,
                            int64_t rows, int64_t columns, float* to,
                            int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(to + r * to_stride, from + r * from_stride,
                     columns * sizeof(float));
  }
}

// The decays between the rows of a chunk. G is the running sum of g. It may be
// large while the difference of two G is small, so it is kept as the sum of two
// floats, of which `low` is the rounding error of `high`.
struct Decays {
  float high[kDeltaChunkRows] = {};
  float low[kDeltaChunkRows] = {};
  float from_start[kDeltaChunkRows];  // e^G.
  float to_end[kDeltaChunkRows];      // e^(G_C - G) for the last row C.
  float whole;                        // e^G_C.
};

// Returns e^(G_t - G_i) for a vector of rows i.
WEFT_INLINE Vec DecaysBetween(const Decays& decays, int64_t t, int64_t i) {
  return Exp((decays.high[t] - Load(decays.high + i)) +
             (decays.low[t] - Load(decays.low + i)));
}

void FillDecays(const DeltaChunkRows& rows, Decays* decays) {
  double sum = 0;
  for (int64_t t = 0; t < rows.num_rows; ++t) {
    sum += rows.g[t * rows.gate_stride];
    decays->high[t] = static_cast<float>(sum);
    decays->low[t] = static_cast<float>(sum - decays->high[t]);
  }
  for (int64_t t = 0; t < rows.num_rows; t += kWidth) {
    Store(decays->from_start + t, Exp(Load(decays->high + t)));
    Store(decays->to_end + t, DecaysBetween(*decays, rows.num_rows - 1, t));
  }
  decays->whole = decays->from_start[rows.num_rows - 1];
}

// Writes e^(G_t - G_i) for i <= t, and 0 for other i.
void FillDecayRow(const Decays& decays, int64_t t, float* row) {
  for (int64_t i = 0; i <= t; i += kWidth) {
    Store(row + i, DecaysBetween(decays, t, i));
  }
  for (int64_t i = t + 1; i < kDeltaChunkRows; ++i) row[i] = 0;
}

// Subtracts from row t of x [C, V] the rows [begin, end) of x, each times an
// element of `factors`.
WEFT_INLINE void SubtractRows(const float* factors, int64_t stride,
                              int64_t begin, int64_t end, int64_t columns,
                              const float* x, float* row) {
  int64_t v = 0;
  for (; v + kStride <= columns; v += kStride) {
    Vec sums[kUnroll] = {};
    for (int64_t i = begin; i < end; ++i) {
      const Vec factor = Fill(factors[i * stride]);
      for (int64_t n = 0; n < kUnroll; ++n) {
        sums[n] = MultiplyAdd(factor, Load(x + i * columns + v + n * kWidth),
                              sums[n]);
      }
    }
    for (int64_t n = 0; n < kUnroll; ++n) {
      Store(row + v + n * kWidth, Load(row + v + n * kWidth) - sums[n]);
    }
  }
  for (; v < columns; v += kWidth) {
    const int64_t rest = columns - v;
    Vec sum = {};
    for (int64_t i = begin; i < end; ++i) {
      sum = MultiplyAdd(Fill(factors[i * stride]),
                        LoadUpTo(x + i * columns + v, rest), sum);
    }
    StoreUpTo(row + v, LoadUpTo(row + v, rest) - sum, rest);
  }
}

inline constexpr int64_t kSolveRows = 16;

// Replaces x [C, V] by (I + a)^-1 x, where `a` is lower triangular with zeros
// on its diagonal. Rows of earlier blocks are subtracted by a product.
void SolveForward(const float* a, int64_t rows, int64_t columns, float* x) {
  for (int64_t block = 0; block < rows; block += kSolveRows) {
    const int64_t end = Smaller(block + kSolveRows, rows);
    if (block > 0) {
      RunPanelProduct({.left_MK = a + block * kScoreStride,
                       .m_stride = kScoreStride,
                       .right_KN = x,
                       .right_stride = columns,
                       .num_rows = end - block,
                       .num_terms = block,
                       .num_columns = columns,
                       .scale = -1,
                       .adds = true,
                       .out_MN = x + block * columns,
                       .out_stride = columns});
    }
    for (int64_t t = block + 1; t < end; ++t) {
      SubtractRows(a + t * kScoreStride, 1, block, t, columns, x,
                   x + t * columns);
    }
  }
}

// Replaces x [C, V] by (I + a)^-T x.
void SolveBackward(const float* a, int64_t rows, int64_t columns, float* x) {
  const int64_t last_block = (rows - 1) / kSolveRows * kSolveRows;
  for (int64_t block = last_block; block >= 0; block -= kSolveRows) {
    const int64_t end = Smaller(block + kSolveRows, rows);
    if (end < rows) {
      RunPanelProduct({.left_MK = a + end * kScoreStride + block,
                       .m_stride = 1,
                       .k_stride = kScoreStride,
                       .right_KN = x + end * columns,
                       .right_stride = columns,
                       .num_rows = end - block,
                       .num_terms = rows - end,
                       .num_columns = columns,
                       .scale = -1,
                       .adds = true,
                       .out_MN = x + block * columns,
                       .out_stride = columns});
    }
    for (int64_t t = end - 2; t >= block; --t) {
      SubtractRows(a + t, kScoreStride, t + 1, end, columns, x,
                   x + t * columns);
    }
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_DELTA_SOLVE_BODY_H_
