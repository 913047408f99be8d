// Reads weights in f32, bf16 and 8 bits for skinny products, the products of
// few rows. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_SKINNY_WEIGHTS_H_
#define WEFT_KERNELS_CPU_SKINNY_WEIGHTS_H_

#include "kernels/cpu/int8_rows_body.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/skinny_product.h"

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
  typedef int8_t Register __attribute__((vector_size(16)));
  Register bytes = {};
  __builtin_memcpy(&bytes, p, kWidth);
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

// Returns weight i of the row at `weight`.
WEFT_INLINE float WeightAt(const SkinnyProduct&, const float* weight,
                           int64_t i) {
  return weight[i];
}

WEFT_INLINE float WeightAt(const SkinnyProduct&, const uint16_t* weight,
                           int64_t i) {
  return __builtin_bit_cast(float, uint32_t{weight[i]} << 16);
}

WEFT_INLINE float WeightAt(const SkinnyProduct& p, const int8_t* weight,
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
  const char* at;
  const char* end;
  int64_t step_bytes;  // Bytes that one Step prefetches.

  WEFT_INLINE void Step() {
    const char* stop = end - at < step_bytes ? end : at + step_bytes;
    for (; at < stop; at += kLineBytes) __builtin_prefetch(at, 0, 2);
  }
};

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_SKINNY_WEIGHTS_H_
