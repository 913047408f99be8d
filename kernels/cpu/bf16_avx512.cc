// Implements bf16_product.h with AVX512_BF16. Only this source is compiled for
// that instruction set. So it calls no inline functions of headers: the linker
// could use this source's copy of such a function on any processor. The
// compiler's intrinsics are safe, because they are always inlined.
#include <immintrin.h>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/tables.h"

namespace weft::kernels::cpu {
namespace {

constexpr int64_t kLanes = 16;  // f32 numbers, or pairs of bf16, in a vector.
// The most vectors of sums in a tile. These sums, one row of the panel and one
// pair of x fill up to 29 of the 32 registers.
constexpr int64_t kTileSums = 24;
// The size of a tile for a panel of kBf16PanelOutputs outputs.
constexpr int64_t kWholeVectors = kBf16PanelOutputs / kLanes;
constexpr int64_t kWholeRows = kTileSums / kWholeVectors;
// Pairs of adjacent inputs in a cache line.
constexpr int64_t kLinePairs = 16;

typedef uint32_t Bits __attribute__((vector_size(64)));

// Returns a mask of the first `count` of 32 lanes: none if `count` < 0, and all
// if `count` > 32.
__mmask32 FirstOf32(int64_t count) {
  if (count >= 32) return ~__mmask32{0};
  return count <= 0 ? 0 : (__mmask32{1} << count) - 1;
}

__mmask16 FirstOf16(int64_t count) {
  return static_cast<__mmask16>(FirstOf32(count));
}

void RoundRow(const float* x, float scale, int64_t count, uint16_t* y) {
  const __m512 factor = _mm512_set1_ps(scale);
  const auto load = [&](int64_t i) {
    return factor * _mm512_maskz_loadu_ps(FirstOf16(count - i), x + i);
  };
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    const int64_t left = count - i;
    _mm512_mask_storeu_epi16(
        y + i, FirstOf32(left + left % 2),
        (__m512i)_mm512_cvtne2ps_pbh(load(i + kLanes), load(i)));
  }
}

// Transposes 16 x 16 numbers of 32 bits in place. Each round interleaves the
// lanes of rows i and i + 8, and four rounds move every lane to its place.
void Transpose(__m512i (&rows)[kLanes]) {
  const __m512i low =
      _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512i merged[kLanes];
  for (int round = 0; round < 4; ++round) {
    for (int64_t i = 0; i < 8; ++i) {
      merged[2 * i] = _mm512_permutex2var_epi32(rows[i], low, rows[i + 8]);
      merged[2 * i + 1] = _mm512_permutex2var_epi32(rows[i], high, rows[i + 8]);
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = merged[i];
  }
}

// Reads a weight in bf16.
struct Bf16Reader {
  using Element = uint16_t;

  // Returns up to 32 adjacent elements, with zeros after `count`.
  __m512i Line(const uint16_t* from, int64_t count) const {
    return _mm512_maskz_loadu_epi16(FirstOf32(count), from);
  }
  // Returns up to 16 adjacent elements, each in the lower half of 32 bits, with
  // zeros after `count`.
  Bits Halves(const uint16_t* from, int64_t count) const {
    const __mmask16 mask = FirstOf16(count);
    return (Bits)_mm512_maskz_cvtepu16_epi32(
        mask, _mm256_maskz_loadu_epi16(mask, from));
  }
};

// Reads a weight in f32, multiplies it by `factor` and rounds it to bf16.
struct F32Reader {
  using Element = float;

  __m512 Load(const float* from, int64_t count) const {
    return factor * _mm512_maskz_loadu_ps(FirstOf16(count), from);
  }
  __m512i Line(const float* from, int64_t count) const {
    return (__m512i)_mm512_cvtne2ps_pbh(Load(from + kLanes, count - kLanes),
                                        Load(from, count));
  }
  Bits Halves(const float* from, int64_t count) const {
    return (Bits)_mm512_maskz_cvtepu16_epi32(
        FirstOf16(count), (__m256i)_mm512_cvtneps_pbh(Load(from, count)));
  }

  __m512 factor;
};

// Packs a source whose inputs are adjacent, as in y = x W^T.
template <typename Reader>
void PackRows(const Reader& reader,
              const Bf16PanelSource<typename Reader::Element>& source,
              uint16_t* panel) {
  for (int64_t first = 0; first < kBf16PanelOutputs; first += kLanes) {
    for (int64_t input = 0; input < source.num_inputs; input += 2 * kLanes) {
      const int64_t left = source.num_inputs - input;
      __m512i rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t output = first + i;
        const bool is_inside = output < source.num_outputs;
        rows[i] = is_inside
                      ? reader.Line(source.weight +
                                        output * source.output_stride + input,
                                    left)
                      : _mm512_setzero_si512();
      }
      Transpose(rows);
      const int64_t num_pairs = (left + 1) / 2;
      for (int64_t i = 0; i < kLanes && i < num_pairs; ++i) {
        _mm512_storeu_si512(
            panel + (input + 2 * i) * kBf16PanelOutputs + 2 * first, rows[i]);
      }
    }
  }
}

// Packs a source whose outputs are adjacent, as in y = x W.
template <typename Reader>
void PackColumns(const Reader& reader,
                 const Bf16PanelSource<typename Reader::Element>& source,
                 uint16_t* panel) {
  for (int64_t input = 0; input < source.num_inputs; input += 2) {
    const auto* even = source.weight + input * source.input_stride;
    const bool has_odd = input + 1 < source.num_inputs;
    for (int64_t first = 0; first < kBf16PanelOutputs; first += kLanes) {
      const int64_t left = source.num_outputs - first;
      const Bits odd = reader.Halves(
          has_odd ? even + source.input_stride + first : even + first,
          has_odd ? left : 0);
      _mm512_storeu_si512(
          panel + input * kBf16PanelOutputs + 2 * first,
          (__m512i)(reader.Halves(even + first, left) | odd << 16));
    }
  }
}

template <typename Reader>
void Pack(const Reader& reader,
          const Bf16PanelSource<typename Reader::Element>& source,
          uint16_t* panel) {
  if (source.input_stride == 1) {
    PackRows(reader, source, panel);
  } else {
    PackColumns(reader, source, panel);
  }
}

void PackPanel(const Bf16PanelSource<uint16_t>& source, uint16_t* panel) {
  Pack(Bf16Reader(), source, panel);
}

void RoundPanel(const Bf16PanelSource<float>& source, float scale,
                uint16_t* panel) {
  Pack(F32Reader{_mm512_set1_ps(scale)}, source, panel);
}

// Returns the pair of bf16 at x in every lane.
__m512bh PairOf(const uint16_t* x) {
  int pair;
  __builtin_memcpy(&pair, x, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

// Prefetches the part of y that the next tile writes. The hardware does not
// predict addresses that are a row of y apart. On Zen 5 with two threads, for
// 4096 rows of 576 inputs and 3072 outputs, a core computes 455 GFLOP/s.
// Without this prefetch and the prefetch in AddProducts, it computes 365.
template <int64_t kRows, int64_t kVectors>
[[gnu::always_inline]] inline void PrefetchSums(const float* y,
                                                int64_t y_stride) {
  for (int64_t r = kRows; r < 2 * kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      __builtin_prefetch(y + r * y_stride + v * kLanes, /*rw=*/1);
    }
  }
}

// The operands of a tile: rows of x, and a panel.
struct Inputs {
  const uint16_t* x;
  int64_t row_stride;
  int64_t pair_stride;
  const uint16_t* panel;
  int64_t num_inputs;
};

// Adds the products of all inputs to the sums of a tile.
template <int64_t kRows, int64_t kVectors>
[[gnu::always_inline]] inline void AddProducts(
    const Inputs& inputs, __m512 (&sums)[kRows][kVectors]) {
  const int64_t num_pairs = (inputs.num_inputs + 1) / 2;
  for (int64_t i = 0; i < num_pairs; ++i) {
    __m512bh weights[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) {
      weights[v] = (__m512bh)_mm512_loadu_si512(
          inputs.panel + 2 * (i * kBf16PanelOutputs + v * kLanes));
    }
    const uint16_t* x = inputs.x + i * inputs.pair_stride;
    if (i % kLinePairs == 0) {
      // Prefetches one cache line from each x row of the next tile.
      for (int64_t r = kRows; r < 2 * kRows; ++r) {
        __builtin_prefetch(x + r * inputs.row_stride);
      }
    }
    for (int64_t r = 0; r < kRows; ++r) {
      const __m512bh pair = PairOf(x + r * inputs.row_stride);
      for (int64_t v = 0; v < kVectors; ++v) {
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weights[v], pair);
      }
    }
  }
}

// Multiplies kRows rows of x, from `row` on, with the panel's first kVectors
// vectors of outputs.
template <int64_t kRows, int64_t kVectors>
void Tile(const Bf16PanelProduct& p, int64_t row) {
  float* y = p.y_BO + row * p.y_stride;
  PrefetchSums<kRows, kVectors>(y, p.y_stride);
  __m512 sums[kRows][kVectors];
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const __mmask16 mask = p.adds ? FirstOf16(p.num_outputs - v * kLanes) : 0;
      sums[r][v] = _mm512_maskz_loadu_ps(mask, y + r * p.y_stride + v * kLanes);
    }
  }
  AddProducts({.x = p.x + row * p.x_row_stride,
               .row_stride = p.x_row_stride,
               .pair_stride = p.x_pair_stride,
               .panel = p.panel,
               .num_inputs = p.num_inputs},
              sums);
  if (p.last.num_inputs > 0) {
    AddProducts({.x = p.last.x + row * p.last.x_row_stride,
                 .row_stride = p.last.x_row_stride,
                 .pair_stride = 2,
                 .panel = p.last.panel,
                 .num_inputs = p.last.num_inputs},
                sums);
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      _mm512_mask_storeu_ps(y + r * p.y_stride + v * kLanes,
                            FirstOf16(p.num_outputs - v * kLanes), sums[r][v]);
    }
  }
}

// Multiplies the rows that fill whole tiles. Returns the first row that is
// left.
template <int64_t kVectors>
int64_t RunTiles(const Bf16PanelProduct& p) {
  constexpr int64_t kRows = kTileSums / kVectors;
  int64_t row = 0;
  for (; row + kRows <= p.num_rows; row += kRows) Tile<kRows, kVectors>(p, row);
  return row;
}

// Multiplies the rows that fill whole tiles of the panel's width. A tile of few
// outputs has more rows, so that the number of independent sums is the same.
// Returns the first row that is left.
int64_t RunTiles(const Bf16PanelProduct& p) {
  switch ((p.num_outputs + kLanes - 1) / kLanes) {
    case 1:
      return RunTiles<1>(p);
    case 2:
      return RunTiles<2>(p);
    case 3:
      return RunTiles<3>(p);
    default:
      return RunTiles<kWholeVectors>(p);
  }
}

void MultiplyPanel(const Bf16PanelProduct& p) {
  int64_t row = RunTiles(p);
  for (; row + kWholeRows <= p.num_rows; row += kWholeRows) {
    Tile<kWholeRows, kWholeVectors>(p, row);
  }
  switch (p.num_rows - row) {
    case 1:
      return Tile<1, kWholeVectors>(p, row);
    case 2:
      return Tile<2, kWholeVectors>(p, row);
    case 3:
      return Tile<3, kWholeVectors>(p, row);
    case 4:
      return Tile<4, kWholeVectors>(p, row);
    case 5:
      return Tile<5, kWholeVectors>(p, row);
    default:
      return;
  }
}

}  // namespace

const Bf16KernelTable& Bf16Avx512Table() {
  static constexpr Bf16KernelTable kTable = {.name = "avx512_bf16",
                                             .round_row = RoundRow,
                                             .pack_panel = PackPanel,
                                             .round_panel = RoundPanel,
                                             .multiply_panel = MultiplyPanel};
  return kTable;
}

}  // namespace weft::kernels::cpu
