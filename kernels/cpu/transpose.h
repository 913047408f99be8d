// Transposes rows of floats in registers. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_TRANSPOSE_H_
#define WEFT_KERNELS_CPU_TRANSPOSE_H_

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
    const Vec ab_low = WEFT_SHUFFLE(a, b, 0, kWidth, 1, kWidth + 1);
    const Vec ab_high = WEFT_SHUFFLE(a, b, 2, kWidth + 2, 3, kWidth + 3);
    const Vec cd_low = WEFT_SHUFFLE(c, d, 0, kWidth, 1, kWidth + 1);
    const Vec cd_high = WEFT_SHUFFLE(c, d, 2, kWidth + 2, 3, kWidth + 3);
    Store(to, WEFT_SHUFFLE(ab_low, cd_low, 0, 1, kWidth, kWidth + 1));
    Store(to + stride,
          WEFT_SHUFFLE(ab_low, cd_low, 2, 3, kWidth + 2, kWidth + 3));
    Store(to + 2 * stride,
          WEFT_SHUFFLE(ab_high, cd_high, 0, 1, kWidth, kWidth + 1));
    Store(to + 3 * stride,
          WEFT_SHUFFLE(ab_high, cd_high, 2, 3, kWidth + 2, kWidth + 3));
  }
  for (; k < count; ++k, to += stride) {
    for (int64_t i = 0; i < kWidth; ++i) to[i] = rows[i][k];
  }
}

#undef WEFT_SHUFFLE
#undef WEFT_LANES

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_TRANSPOSE_H_
