// Implements row_product_f32, _bf16 and _int8 of kernels.h, tile by tile.
// Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_ROW_PRODUCT_BODY_H_
#define WEFT_KERNELS_CPU_ROW_PRODUCT_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/one_row_product.h"
#include "kernels/cpu/row_tile.h"
#include "kernels/cpu/row_weights.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Cuts the rows of x into tiles of nearly equal size. Runs each tile on the
// inputs [begin, begin + inputs) of kRowOutputs rows of a weight.
template <typename Weight>
WEFT_INLINE void RunTiles(const RowProduct& p, const WeightRows<Weight>& weight,
                          int64_t begin, int64_t inputs, Fetch& fetch,
                          float* totals) {
  const int64_t num_tiles = (p.num_rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = p.num_rows * tile / num_tiles;
    RunTile(p.num_rows * (tile + 1) / num_tiles - row,
            {p.x_BI + row * p.x_stride + begin, p.x_stride, kWidth}, weight,
            inputs, fetch, begin == 0, totals + row * kRowOutputs, kRowOutputs);
  }
}

// Returns the prefetches of the weight rows that follow the kRowOutputs rows
// from `output` on, for a step of each vector of each tile.
template <typename Weight>
WEFT_INLINE Fetch FetchAfter(const RowProduct& p, const Weight* weight,
                             int64_t output) {
  const int64_t num_tiles = (p.num_rows + kTileRows - 1) / kTileRows;
  const int64_t num_steps = num_tiles * (p.num_inputs / kWidth + 1);
  const int64_t next_rows = Smaller(p.end - output - kRowOutputs, kRowOutputs);
  // Four weight rows in bf16 or 8 bits are multiplied too fast to hide the
  // latency of memory, so their prefetches are further ahead.
  constexpr int64_t kAhead = sizeof(Weight) < sizeof(float) ? kAheadBytes : 0;
  const char* next =
      (const char*)(weight + (output + kRowOutputs) * p.weight_stride) + kAhead;
  const int64_t bytes = next_rows * p.weight_stride * int64_t{sizeof(Weight)};
  return {.at = next,
          .end = next + bytes,
          .step_bytes = (bytes + num_steps - 1) / num_steps};
}

// Computes kRowOutputs outputs of up to kFewRows rows of x. The first tile
// brings the weight rows into the first-level cache, so that they are read from
// memory once for all rows of x.
template <typename Weight>
WEFT_INLINE void RunFewRows(const RowProduct& p, const Weight* weight,
                            int64_t output) {
  float totals[kFewRows * kRowOutputs] = {};
  float wide[sizeof(Weight) < sizeof(float) ? kRowOutputs * kRowPart : 1];
  Fetch fetch = FetchAfter(p, weight, output);
  const int64_t whole = WholeInputs(p);
  for (int64_t begin = 0; begin < whole; begin += kRowPart) {
    const int64_t inputs = Smaller(kRowPart, whole - begin);
    // With more than two tiles, widening once is faster than in every tile.
    if (sizeof(Weight) < sizeof(float) && p.num_rows > 2 * kTileRows) {
      WidenRows(p, weight, output, kRowOutputs, begin, inputs, wide);
      RunTiles(p, WeightRows<float>{wide, kRowPart}, begin, inputs, fetch,
               totals);
    } else {
      RunTiles(p, RowsAt(p, weight, output, begin), begin, inputs, fetch,
               totals);
    }
  }
  for (int64_t row = 0; row < p.num_rows; ++row) {
    WriteOutputs(p, weight, row, output, totals + row * kRowOutputs);
  }
}

// Copies inputs [begin, begin + inputs) of the rows to `copy`. A tile's vectors
// are in the order in which the tile reads them.
WEFT_INLINE void CopyTiles(const RowProduct& p, int64_t begin, int64_t inputs,
                           float* copy) {
  for (int64_t row = 0; row < p.num_rows; row += kTileRows) {
    const int64_t rows = Smaller(kTileRows, p.num_rows - row);
    const float* from = p.x_BI + row * p.x_stride + begin;
    for (int64_t i = 0; i < inputs; i += kWidth) {
      for (int64_t r = 0; r < rows; ++r, copy += kWidth) {
        Store(copy, Load(from + r * p.x_stride + i));
      }
    }
  }
}

// Prefetches a part of some weight rows, a few cache lines at a time.
struct RowsAhead {
  const char* row = nullptr;
  int64_t stride = 0;  // In bytes.
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t done = 0;  // Bytes of the current row.

  WEFT_INLINE void Step(int64_t lines) {
    for (; rows > 0 && lines > 0; --lines) {
      __builtin_prefetch(row + done, 0, 2);
      done += Fetch::kLineBytes;
      if (done < row_bytes) continue;
      done = 0;
      row += stride;
      --rows;
    }
  }
};

// Multiplies the rows that CopyTiles copied with the rows [output, end) of the
// weight. Keeps the sums of the parts so far in y. Meanwhile prefetches
// `ahead`.
template <typename Weight>
WEFT_INLINE void RunCopiedTiles(const RowProduct& p, const Weight* weight,
                                int64_t output, int64_t end, int64_t begin,
                                int64_t inputs, RowsAhead ahead) {
  float* wide = p.memory + kRowBlock * kRowPart;
  const int64_t lines = ahead.rows * (ahead.row_bytes / Fetch::kLineBytes + 1);
  const int64_t tiles =
      (p.num_rows + kTileRows - 1) / kTileRows * ((end - output) / kRowOutputs);
  const int64_t step = (lines + tiles - 1) / tiles;
  if constexpr (sizeof(Weight) < sizeof(float)) {
    WidenRows(p, weight, output, end - output, begin, inputs, wide);
  }
  NoFetch no_fetch;
  for (int64_t row = 0; row < p.num_rows; row += kTileRows) {
    const int64_t rows = Smaller(kTileRows, p.num_rows - row);
    const TileRows x{p.memory + row * inputs, kWidth, rows * kWidth};
    for (int64_t o = output; o < end; o += kRowOutputs) {
      float* totals = p.y_BO + row * p.y_stride + o;
      ahead.Step(step);
      if constexpr (sizeof(Weight) < sizeof(float)) {
        RunTile(rows, x,
                WeightRows<float>{wide + (o - output) * kRowPart, kRowPart},
                inputs, no_fetch, begin == 0, totals, p.y_stride);
      } else {
        RunTile(rows, x, RowsAt(p, weight, o, begin), inputs, no_fetch,
                begin == 0, totals, p.y_stride);
      }
    }
  }
}

// Computes the outputs [begin, end) of up to kRowBlock rows of x.
template <typename Weight>
void RunBlock(const RowProduct& p, const Weight* weight, int64_t first,
              int64_t end) {
  const int64_t whole = WholeInputs(p);
  for (int64_t begin = 0; begin < whole; begin += kRowPart) {
    const int64_t inputs = Smaller(kRowPart, whole - begin);
    CopyTiles(p, begin, inputs, p.memory);
    for (int64_t o = first; o < end; o += kWideOutputs) {
      const int64_t next = Smaller(o + kWideOutputs, end);
      RunCopiedTiles(
          p, weight, o, next, begin, inputs,
          {.row = (const char*)(weight + next * p.weight_stride + begin),
           .stride = p.weight_stride * int64_t{sizeof(Weight)},
           .rows = Smaller(kWideOutputs, end - next),
           .row_bytes = inputs * int64_t{sizeof(Weight)}});
    }
  }
  if (whole == p.num_inputs && p.bias_O == nullptr) return;
  for (int64_t row = 0; row < p.num_rows; ++row) {
    float* y = p.y_BO + row * p.y_stride;
    for (int64_t o = first; o < end; ++o) {
      WriteOutput(p, weight, row, o, whole > 0 ? y[o] : 0);
    }
  }
}

template <typename Weight>
void RunManyRows(const RowProduct& p, const Weight* weight, int64_t end) {
  RowProduct block = p;
  for (int64_t row = 0; row < p.num_rows; row += kRowBlock) {
    block.num_rows = Smaller(kRowBlock, p.num_rows - row);
    RunBlock(block, weight, p.begin, end);
    block.x_BI += kRowBlock * p.x_stride;
    block.y_BO += kRowBlock * p.y_stride;
  }
}

template <typename Weight>
void RunRowProduct(const RowProduct& p, const Weight* weight) {
  if (p.num_rows == 1) return RunOneRow(p, weight);
  const int64_t end = p.begin + (p.end - p.begin) / kRowOutputs * kRowOutputs;
  if (p.num_rows > kFewRows) {
    RunManyRows(p, weight, end);
  } else {
    for (int64_t o = p.begin; o < end; o += kRowOutputs) {
      RunFewRows(p, weight, o);
    }
  }
  for (int64_t o = end; o < p.end; ++o) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      WriteOutput(p, weight, row, o,
                  SumRow(p, p.x_BI + row * p.x_stride, weight, o));
    }
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_ROW_PRODUCT_BODY_H_
