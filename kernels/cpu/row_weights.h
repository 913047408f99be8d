// Reads rows of weights in f32, bf16 and 8 bits for row products. Compiled only
// in table_*.cc.
#ifndef WEFT_KERNELS_CPU_ROW_WEIGHTS_H_
#define WEFT_KERNELS_CPU_ROW_WEIGHTS_H_

#include "kernels/cpu/int8_rows_body.h"
#include "kernels/cpu/row_product.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));
typedef uint32_t BitsVec __attribute__((vector_size(kWidth * 4)));

WEFT_INLINE Vec LoadWeights(const float* p) { return Load(p); }

// A bf16 number is the upper half of an f32.
WEFT_INLINE Vec LoadWeights(const uint16_t* p) {
  HalfVec half;
  __builtin_memcpy(&half, p, sizeof(half));
  return (Vec)(__builtin_convertvector(half, BitsVec) << 16);
}

// Returns the integers q of int8_rows.h as floats. With AVX2, uses inline
// assembly, because GCC 12 would convert byte by byte.
WEFT_INLINE Vec LoadWeights(const int8_t* p) {
#if defined(__AVX2__)
  typedef int64_t Register __attribute__((vector_size(16)));
  Register bytes = {};
  if constexpr (kWidth == 16) {
    __builtin_memcpy(&bytes, p, sizeof(bytes));
  } else {
    int64_t low;
    __builtin_memcpy(&low, p, sizeof(low));
    bytes[0] = low;
  }
  IntVec ints;
  asm("vpmovsxbd %1, %0" : "=v"(ints) : "v"(bytes));
#else
  typedef int8_t ByteVec __attribute__((vector_size(kWidth)));
  ByteVec bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  const IntVec ints = __builtin_convertvector(bytes, IntVec);
#endif
  return __builtin_convertvector(ints, Vec);
}

// Rows of a weight, which begin at any multiple of kInt8Group inputs. At
// returns inputs [i, i + kWidth) of row o as f32, which is exact. Callers call
// Enter(i) before At(o, i), for ascending i.
template <typename Weight>
struct WeightRows {
  const Weight* data;
  int64_t stride;

  WEFT_INLINE void Enter(int64_t) {}
  WEFT_INLINE Vec At(int64_t o, int64_t i) const {
    return LoadWeights(data + o * stride + i);
  }
};

// Reads each scale once for its whole group.
template <>
struct WeightRows<int8_t> {
  const int8_t* data;    // At the first input to read.
  const int8_t* scales;  // Of the first row, for that input.
  int64_t stride;
  float scale[kRowOutputs] = {};

  WEFT_INLINE float ScaleAt(int64_t o, int64_t i) const {
    return Int8ScaleAt(scales + o * stride + i / kInt8Group * kInt8ScaleBytes);
  }
  WEFT_INLINE void Enter(int64_t i) {
    if (i % kInt8Group != 0) return;
    WEFT_UNROLL
    for (int64_t o = 0; o < kRowOutputs; ++o) scale[o] = ScaleAt(o, i);
  }
  WEFT_INLINE Vec At(int64_t o, int64_t i) const {
    return LoadWeights(data + o * stride + i) * Fill(scale[o]);
  }
};

// Returns the rows from `output` on, at input `begin`, a multiple of
// kInt8Group.
template <typename Weight>
WEFT_INLINE WeightRows<Weight> RowsAt(const RowProduct& p, const Weight* weight,
                                      int64_t output, int64_t begin) {
  return {weight + output * p.weight_stride + begin, p.weight_stride};
}

WEFT_INLINE WeightRows<int8_t> RowsAt(const RowProduct& p, const int8_t* weight,
                                      int64_t output, int64_t begin) {
  const int8_t* row = weight + output * p.weight_stride;
  return {row + begin,
          row + p.num_inputs + begin / kInt8Group * kInt8ScaleBytes,
          p.weight_stride};
}

// Returns weight i of the row at `weight`.
WEFT_INLINE float WeightAt(const RowProduct&, const float* weight, int64_t i) {
  return weight[i];
}

WEFT_INLINE float WeightAt(const RowProduct&, const uint16_t* weight,
                           int64_t i) {
  return __builtin_bit_cast(float, uint32_t{weight[i]} << 16);
}

WEFT_INLINE float WeightAt(const RowProduct& p, const int8_t* weight,
                           int64_t i) {
  return (float)weight[i] * Int8Scale(weight, p.num_inputs, i);
}

// The distance from the weights that are read to the memory that is prefetched.
// Twice this distance is faster in some runs and slower in others.
inline constexpr int64_t kAheadBytes = 4096;

// Prefetches the memory [at, end) line by line, in the order of addresses. The
// hardware alone does not prefetch four rows that are read in parallel (Zen 4,
// one core: 13 GB/s, where memory gives 30). The lines go to the second-level
// cache, because x fills the first-level cache.
struct Fetch {
  static constexpr int64_t kLineBytes = 64;
  const char* at = nullptr;
  const char* end = nullptr;
  int64_t step_bytes = 0;  // Bytes that one Step prefetches.

  WEFT_INLINE void Step() {
    const char* stop = end - at < step_bytes ? end : at + step_bytes;
    for (; at < stop; at += kLineBytes) __builtin_prefetch(at, 0, 2);
  }
};

void WidenBf16Row(const uint16_t* row, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) Store(out + i, LoadWeights(row + i));
  for (; i < count; ++i) {
    out[i] = __builtin_bit_cast(float, uint32_t{row[i]} << 16);
  }
}

struct NoFetch {
  WEFT_INLINE void Step() {}
};

// Writes `inputs` inputs of some rows to `wide` as f32, which is exact. Row r
// begins at wide + r * kRowPart. `output` and `begin` are the first row and its
// first input, a multiple of kInt8Group; `inputs` is a multiple of kWidth.
template <typename Weight>
WEFT_INLINE void WidenRows(const RowProduct& p, const Weight* weight,
                           int64_t output, int64_t rows, int64_t begin,
                           int64_t inputs, float* wide) {
  for (int64_t r = 0; r < rows; ++r, wide += kRowPart) {
    const Weight* from = weight + (output + r) * p.weight_stride + begin;
    for (int64_t i = 0; i < inputs; i += kWidth) {
      __builtin_prefetch((const char*)(from + i) + kAheadBytes);
      Store(wide + i, LoadWeights(from + i));
    }
  }
}

WEFT_INLINE void WidenRows(const RowProduct& p, const int8_t* weight,
                           int64_t output, int64_t rows, int64_t begin,
                           int64_t inputs, float* wide) {
  for (int64_t r = 0; r < rows; ++r, wide += kRowPart) {
    const int8_t* row = weight + (output + r) * p.weight_stride;
    for (int64_t i = 0; i < inputs; i += kWidth) {
      __builtin_prefetch((const char*)(row + begin + i) + kAheadBytes);
      const Vec scale = Fill(Int8Scale(row, p.num_inputs, begin + i));
      Store(wide + i, LoadWeights(row + begin + i) * scale);
    }
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_ROW_WEIGHTS_H_
