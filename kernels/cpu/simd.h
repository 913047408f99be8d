// Vectors of floats for the CPU kernels. They use the compiler's vector
// extension and plain C++ operators. They are as wide as the vectors of the
// instruction set for which a source is compiled.
//
// Each instruction set has a source (table_*.cc), which includes this header in
// a namespace of its own (WEFT_KERNEL_ISA). So the linker cannot pick an
// AVX-512 copy of an inline function for a processor without AVX-512. For the
// same reason this header includes no header with inline functions.
#ifndef WEFT_KERNELS_CPU_SIMD_H_
#define WEFT_KERNELS_CPU_SIMD_H_

#include <cstdint>

#ifndef WEFT_KERNEL_ISA
#error "Define WEFT_KERNEL_ISA: this header belongs to the table_*.cc files."
#endif

#define WEFT_INLINE inline __attribute__((always_inline))

// Tells the compiler that the iterations of the loop that follows are
// independent, so that it may vectorise the loop.
#ifdef __clang__
#define WEFT_INDEPENDENT_ITERATIONS \
  _Pragma("clang loop vectorize(assume_safety)")
#else
#define WEFT_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

// A function that is compiled once. Of a copy, the compiler could fuse other
// operations, so its bits would depend on the caller.
#ifdef __clang__
#define WEFT_ONE_BODY [[gnu::noinline]]
#else
#define WEFT_ONE_BODY [[gnu::noipa]]
#endif

// Unrolls the loop that follows, so that its array of vectors is in registers.
#ifdef __clang__
#define WEFT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define WEFT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

#if defined(__AVX512F__)
inline constexpr int64_t kWidth = 16;
#elif defined(__AVX__)
inline constexpr int64_t kWidth = 8;
#else
inline constexpr int64_t kWidth = 4;
#endif

// The number of independent sums in a loop. Several sums hide the latency of an
// addition.
inline constexpr int64_t kUnroll = 4;
inline constexpr int64_t kStride = kWidth * kUnroll;

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));

// Returns x in every lane. x - 0 is x for every x, so the compiler drops the
// subtraction. It could not drop an addition of 0, because -0 + 0 is +0.
WEFT_INLINE Vec Fill(float x) { return x - Vec{}; }

// Returns a b + c, rounded once if the instruction set has fused operations. In
// a plain a * b + c, the surrounding code would decide whether the compiler
// fuses.
WEFT_INLINE Vec MultiplyAdd(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  constexpr int16_t kAllLanes = -1;
  constexpr int kCurrentRounding = 4;
  return __builtin_ia32_vfmaddps512_mask(a, b, c, kAllLanes, kCurrentRounding);
#elif defined(__FMA__)
  return __builtin_ia32_vfmaddps256(a, b, c);
#else
  return a * b + c;
#endif
}

WEFT_INLINE Vec Load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

WEFT_INLINE void Store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }

// Returns the lanes' own numbers.
WEFT_INLINE IntVec LaneNumbers() {
  IntVec index;
  for (int32_t lane = 0; lane < kWidth; ++lane) index[lane] = lane;
  return index;
}

// Loads the first `count` < kWidth floats. The other lanes get `fill`.
WEFT_INLINE Vec LoadPart(const float* p, int64_t count, float fill) {
#if defined(__AVX512F__)
  const auto mask = (uint16_t)((1U << count) - 1);
  return __builtin_ia32_loadups512_mask(p, Fill(fill), mask);
#elif defined(__AVX2__)
  const IntVec mask = LaneNumbers() < static_cast<int32_t>(count);
  const Vec v = __builtin_ia32_maskloadps256((const Vec*)p, mask);
  return mask ? v : Fill(fill);
#else
  Vec v = Fill(fill);
  for (int64_t i = 0; i < count; ++i) v[i] = p[i];
  return v;
#endif
}

WEFT_INLINE void StorePart(float* p, Vec v, int64_t count) {
#if defined(__AVX512F__)
  __builtin_ia32_storeups512_mask(p, v, (uint16_t)((1U << count) - 1));
#elif defined(__AVX2__)
  const IntVec mask = LaneNumbers() < static_cast<int32_t>(count);
  __builtin_ia32_maskstoreps256((Vec*)p, mask, v);
#else
  for (int64_t i = 0; i < count; ++i) p[i] = v[i];
#endif
}

// Load and store the first `count` floats, or a whole vector if there are more.
WEFT_INLINE Vec LoadFirst(const float* p, int64_t count) {
  return count < kWidth ? LoadPart(p, count, 0) : Load(p);
}

WEFT_INLINE void StoreFirst(float* p, Vec v, int64_t count) {
  if (count < kWidth) {
    StorePart(p, v, count);
  } else {
    Store(p, v);
  }
}

WEFT_INLINE int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A vector of four floats, which every instruction set has.
typedef float Quad __attribute__((vector_size(16)));

WEFT_INLINE Quad LoadQuad(const float* p) {
  Quad v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

WEFT_INLINE void StoreQuad(float* p, Quad v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

inline constexpr int64_t kQuads = kWidth / 4;

struct Quads {
  Quad part[kQuads];
};

WEFT_INLINE Quads SplitToQuads(Vec v) {
  Quads q;
  __builtin_memcpy(&q, &v, sizeof(q));
  return q;
}

// Adds the upper half of the lanes to the lower half until four lanes are left.
WEFT_INLINE Quad FoldToQuad(Vec v) {
#if defined(__AVX512F__)
  typedef float Half __attribute__((vector_size(32)));
  const Half h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX__)
  const Vec h = v;
#endif
#if defined(__AVX__)
  return __builtin_shufflevector(h, h, 0, 1, 2, 3) +
         __builtin_shufflevector(h, h, 4, 5, 6, 7);
#else
  return v;
#endif
}

WEFT_INLINE float Sum(Vec v) {
  const Quad q = FoldToQuad(v);
  return (q[0] + q[2]) + (q[1] + q[3]);
}

// Returns the larger of each pair of lanes, or a's lane if one of them is NaN.
WEFT_INLINE Vec Max(Vec a, Vec b) { return b > a ? b : a; }

WEFT_INLINE float MaxLane(Vec v) {
  const Quads q = SplitToQuads(v);
  Quad best = q.part[0];
  for (int64_t i = 1; i < kQuads; ++i) {
    best = q.part[i] > best ? q.part[i] : best;
  }
  const float a = best[1] > best[0] ? best[1] : best[0];
  const float b = best[3] > best[2] ? best[3] : best[2];
  return b > a ? b : a;
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_SIMD_H_
