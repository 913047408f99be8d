// Transposes and sums in the quads of vectors, that is, groups of four lanes.
// Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_QUADS_H_
#define WEFT_KERNELS_CPU_QUADS_H_

#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Shuffles the quads of two vectors: each quad of the result has the lanes i,
// j, k and l of a's quad (0 to 3) and b's quad (kWidth to kWidth + 3).
#define WEFT_LANES(n, i, j, k, l) (i) + (n), (j) + (n), (k) + (n), (l) + (n)
#if defined(__AVX512F__)
#define WEFT_SHUFFLE(a, b, i, j, k, l)                            \
  __builtin_shufflevector(                                        \
      a, b, WEFT_LANES(0, i, j, k, l), WEFT_LANES(4, i, j, k, l), \
      WEFT_LANES(8, i, j, k, l), WEFT_LANES(12, i, j, k, l))
#elif defined(__AVX2__)
#define WEFT_SHUFFLE(a, b, i, j, k, l)                     \
  __builtin_shufflevector(a, b, WEFT_LANES(0, i, j, k, l), \
                          WEFT_LANES(4, i, j, k, l))
#else
#define WEFT_SHUFFLE(a, b, i, j, k, l) \
  __builtin_shufflevector(a, b, WEFT_LANES(0, i, j, k, l))
#endif

// For each quad: {a0, b0, a1, b1}.
WEFT_INLINE Vec MixLow(Vec a, Vec b) {
  return WEFT_SHUFFLE(a, b, 0, kWidth, 1, kWidth + 1);
}

// {a2, b2, a3, b3}.
WEFT_INLINE Vec MixHigh(Vec a, Vec b) {
  return WEFT_SHUFFLE(a, b, 2, kWidth + 2, 3, kWidth + 3);
}

// {a0, a1, b0, b1}.
WEFT_INLINE Vec JoinLow(Vec a, Vec b) {
  return WEFT_SHUFFLE(a, b, 0, 1, kWidth, kWidth + 1);
}

// {a2, a3, b2, b3}.
WEFT_INLINE Vec JoinHigh(Vec a, Vec b) {
  return WEFT_SHUFFLE(a, b, 2, 3, kWidth + 2, kWidth + 3);
}

#undef WEFT_SHUFFLE
#undef WEFT_LANES

// Folds each of kQuads vectors to four lanes as FoldToQuad does. Quad i of the
// result is that of vector i.
WEFT_INLINE Vec FoldToQuads(const Vec (&v)[kQuads]) {
#if defined(__AVX512F__)
  const auto halves = [](Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19,
                                   20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25,
                                   26, 27, 28, 29, 30, 31);
  };
  const Vec ab = halves(v[0], v[1]), cd = halves(v[2], v[3]);
  return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18,
                                 19, 24, 25, 26, 27) +
         __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22,
                                 23, 28, 29, 30, 31);
#elif defined(__AVX__)
  return __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  return v[0];
#endif
}

// Returns the sums of kQuads times four vectors, with the bits of Sum. Quad r
// is {Sum(v[0][r]), Sum(v[1][r]), Sum(v[2][r]), Sum(v[3][r])}.
WEFT_INLINE Vec SumQuads(const Vec (&v)[4][kQuads]) {
  const Vec a = FoldToQuads(v[0]), b = FoldToQuads(v[1]);
  const Vec c = FoldToQuads(v[2]), d = FoldToQuads(v[3]);
  // For each quad {a0 + a2, b0 + b2, a1 + a3, b1 + b3}, and so with c and d.
  const Vec ab = MixLow(a, b) + MixHigh(a, b);
  const Vec cd = MixLow(c, d) + MixHigh(c, d);
  return JoinLow(ab, cd) + JoinHigh(ab, cd);
}

// Returns four columns, from column k on, of the rows j, 4 + j and so on.
WEFT_INLINE Vec LoadQuads(const float* const (&rows)[kWidth], int64_t j,
                          int64_t k) {
  const auto quad = [&](int64_t g) { return LoadQuad(rows[4 * g + j] + k); };
#if defined(__AVX512F__)
  typedef float Half __attribute__((vector_size(32)));
  const Half low =
      __builtin_shufflevector(quad(0), quad(1), 0, 1, 2, 3, 4, 5, 6, 7);
  const Half high =
      __builtin_shufflevector(quad(2), quad(3), 0, 1, 2, 3, 4, 5, 6, 7);
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
                                 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  return __builtin_shufflevector(quad(0), quad(1), 0, 1, 2, 3, 4, 5, 6, 7);
#else
  return quad(0);
#endif
}

// Writes to[k * stride + i] = rows[i][k], for the first `count` columns.
WEFT_INLINE void StoreTransposed(const float* const (&rows)[kWidth],
                                 int64_t count, int64_t stride, float* to) {
  int64_t k = 0;
  for (; k + 4 <= count; k += 4, to += 4 * stride) {
    const Vec a = LoadQuads(rows, 0, k), b = LoadQuads(rows, 1, k);
    const Vec c = LoadQuads(rows, 2, k), d = LoadQuads(rows, 3, k);
    const Vec ab_low = MixLow(a, b), ab_high = MixHigh(a, b);
    const Vec cd_low = MixLow(c, d), cd_high = MixHigh(c, d);
    Store(to, JoinLow(ab_low, cd_low));
    Store(to + stride, JoinHigh(ab_low, cd_low));
    Store(to + 2 * stride, JoinLow(ab_high, cd_high));
    Store(to + 3 * stride, JoinHigh(ab_high, cd_high));
  }
  for (; k < count; ++k, to += stride) {
    for (int64_t i = 0; i < kWidth; ++i) to[i] = rows[i][k];
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_QUADS_H_
