// The bf16 products for AVX512_BF16; see bf16_product.h. The file is compiled
// for that instruction set, so it includes no header with inline functions but
// the compiler's intrinsics, which are always inlined.
#include <immintrin.h>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/tables.h"

namespace weft::kernels::cpu {
namespace {

constexpr int64_t kLanes = 16;  // f32 numbers, or pairs of bf16, of a vector.
constexpr int64_t kVectors = kBf16PanelOutputs / kLanes;
// The sums of a tile, one row of the panel and one pair of x fill 29 of the 32
// registers.
constexpr int64_t kTileRows = 6;
// Pairs of adjacent inputs in a cache line.
constexpr int64_t kLinePairs = 16;

typedef uint32_t Bits __attribute__((vector_size(64)));

// Returns a mask of the first `count` of 32 lanes; `count` may exceed 32.
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

// Transposes 16 x 16 numbers of 32 bits in place. Each round merges the lanes
// of rows i and i + 8, and four rounds move every lane to its place.
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

// Packs a source whose inputs are adjacent, as in y = x W^T.
void PackRows(const Bf16PanelSource& source, uint16_t* panel) {
  for (int64_t first = 0; first < kBf16PanelOutputs; first += kLanes) {
    for (int64_t input = 0; input < source.num_inputs; input += 2 * kLanes) {
      const int64_t left = source.num_inputs - input;
      __m512i rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t output = first + i;
        const bool is_inside = output < source.num_outputs;
        rows[i] =
            is_inside
                ? _mm512_maskz_loadu_epi16(
                      FirstOf32(left),
                      source.weight + output * source.output_stride + input)
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
void PackColumns(const Bf16PanelSource& source, uint16_t* panel) {
  for (int64_t input = 0; input < source.num_inputs; input += 2) {
    const uint16_t* even = source.weight + input * source.input_stride;
    const bool has_odd = input + 1 < source.num_inputs;
    for (int64_t first = 0; first < kBf16PanelOutputs; first += kLanes) {
      const __mmask16 mask = FirstOf16(source.num_outputs - first);
      const auto load = [&](const uint16_t* row, __mmask16 lanes) {
        return (Bits)_mm512_maskz_cvtepu16_epi32(
            lanes, _mm256_maskz_loadu_epi16(lanes, row + first));
      };
      const Bits odd =
          load(has_odd ? even + source.input_stride : even, has_odd ? mask : 0);
      _mm512_storeu_si512(panel + input * kBf16PanelOutputs + 2 * first,
                          (__m512i)(load(even, mask) | odd << 16));
    }
  }
}

void PackPanel(const Bf16PanelSource& source, uint16_t* panel) {
  if (source.input_stride == 1) {
    PackRows(source, panel);
  } else {
    PackColumns(source, panel);
  }
}

// Returns a pair of x in every lane.
__m512bh PairOf(const uint16_t* x) {
  int pair;
  __builtin_memcpy(&pair, x, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

// Prefetches the sums of the next tile, to be written. The hardware does not
// predict addresses that are a row of y apart (Zen 5, two threads, 4096 rows of
// 576 inputs and 3072 outputs: 365 GFLOP/s a core without the two prefetches,
// 455 with them).
template <int64_t kRows>
[[gnu::always_inline]] inline void PrefetchSums(const float* y,
                                                int64_t y_stride) {
  for (int64_t r = kRows; r < 2 * kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      __builtin_prefetch(y + r * y_stride + v * kLanes, /*rw=*/1);
    }
  }
}

// Multiplies kRows rows of x, from `row` on.
template <int64_t kRows>
void Tile(const Bf16PanelProduct& p, int64_t row) {
  const uint16_t* x = p.x + row * p.x_row_stride;
  float* y = p.y_BO + row * p.y_stride;
  PrefetchSums<kRows>(y, p.y_stride);
  __m512 sums[kRows][kVectors];
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const __mmask16 mask = p.adds ? FirstOf16(p.num_outputs - v * kLanes) : 0;
      sums[r][v] = _mm512_maskz_loadu_ps(mask, y + r * p.y_stride + v * kLanes);
    }
  }
  const int64_t num_pairs = (p.num_inputs + 1) / 2;
  for (int64_t i = 0; i < num_pairs; ++i) {
    __m512bh weights[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) {
      weights[v] = (__m512bh)_mm512_loadu_si512(
          p.panel + 2 * (i * kBf16PanelOutputs + v * kLanes));
    }
    if (i % kLinePairs == 0) {
      // The next tile's line of every row.
      for (int64_t r = kRows; r < 2 * kRows; ++r) {
        __builtin_prefetch(x + r * p.x_row_stride + i * p.x_pair_stride);
      }
    }
    for (int64_t r = 0; r < kRows; ++r) {
      const __m512bh pair =
          PairOf(x + r * p.x_row_stride + i * p.x_pair_stride);
      for (int64_t v = 0; v < kVectors; ++v) {
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weights[v], pair);
      }
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      _mm512_mask_storeu_ps(y + r * p.y_stride + v * kLanes,
                            FirstOf16(p.num_outputs - v * kLanes), sums[r][v]);
    }
  }
}

void MultiplyPanel(const Bf16PanelProduct& p) {
  int64_t row = 0;
  for (; row + kTileRows <= p.num_rows; row += kTileRows) {
    Tile<kTileRows>(p, row);
  }
  switch (p.num_rows - row) {
    case 1:
      return Tile<1>(p, row);
    case 2:
      return Tile<2>(p, row);
    case 3:
      return Tile<3>(p, row);
    case 4:
      return Tile<4>(p, row);
    case 5:
      return Tile<5>(p, row);
    default:
      return;
  }
}

}  // namespace

const Bf16KernelTable& Bf16Avx512Table() {
  static constexpr Bf16KernelTable kTable = {.name = "avx512_bf16",
                                             .round_row = RoundRow,
                                             .pack_panel = PackPanel,
                                             .multiply_panel = MultiplyPanel};
  return kTable;
}

}  // namespace weft::kernels::cpu
