// Exponentials of vectors of floats, by polynomials. Compiled only in
// table_*.cc.
#ifndef WEFT_KERNELS_CPU_SIMD_MATH_H_
#define WEFT_KERNELS_CPU_SIMD_MATH_H_

#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Returns e^x within 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, and e^x = 2^n
// p(r) with a polynomial p of degree 7 (Cephes' expf). Returns 0 if the result
// would be below the smallest normal number, and +inf if x > 88.37626. NaN
// stays NaN.
WEFT_INLINE Vec Exp(Vec x) {
  constexpr float kLog2E = 1.44269504088896341F;
  // Adding 1.5 * 2^23 to a number rounds the number to an integer. The sum's
  // lowest bits hold this integer.
  constexpr float kRound = 12582912.0F;
  const Vec shifted = x * kLog2E + kRound;
  const Vec n = shifted - kRound;
  // Subtracts n ln 2 in two parts. The first factor of n has so few bits that
  // its product with n is exact.
  Vec r = x - n * 0.693359375F;
  r = r - n * -2.12194440e-4F;
  Vec p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + (r + 1.0F);
  const IntVec exponent = ((IntVec)shifted + 127) << 23;
  const Vec y = p * (Vec)exponent;
  const Vec low = x < Fill(-87.33654F) ? Vec{} : y;
  return x > Fill(88.37626F) ? Fill(__builtin_inff()) : low;
}

// Returns tanh(x). Near 0 it is a polynomial (Cephes' tanhf), and elsewhere it
// is 1 - 2 / (e^(2x) + 1).
WEFT_INLINE Vec Tanh(Vec x) {
  const Vec s = x * x;
  Vec p = s * -5.70498872745e-3F + 2.06390887954e-2F;
  p = p * s - 5.37397155531e-2F;
  p = p * s + 1.33314422036e-1F;
  p = p * s - 3.33332819422e-1F;
  const Vec small = p * s * x + x;
  const Vec large = 1.0F - 2.0F / (Exp(x + x) + 1.0F);
  return s < Fill(0.390625F) ? small : large;
}

WEFT_INLINE Vec Sigmoid(Vec x) { return 1.0F / (1.0F + Exp(-x)); }

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_SIMD_MATH_H_
