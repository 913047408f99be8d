// The rule for comparing floating-point results: the largest error of a correct
// computation.
#ifndef WEFT_TESTS_SUPPORT_TOLERANCE_H_
#define WEFT_TESTS_SUPPORT_TOLERANCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace weft {

// Each epsilon is the distance from 1 to the next number.
inline constexpr double kEpsilonF64 = 0x1p-52;
inline constexpr double kEpsilonF32 = 0x1p-23;
inline constexpr double kEpsilonBf16 = 0x1p-7;

// Returns the tolerance. Independent rounding errors of a sum of n terms grow
// like sqrt(n) epsilon. The factor 8 covers a few such operations in a row and
// the worst element of a test-sized tensor. Arguments: the epsilon of the dtype
// that rounds; the number of terms in the longest reduction, >= 0 (1:
// elementwise); the largest magnitude of an intermediate value.
inline double Tolerance(double epsilon, int64_t reduction_length,
                        double magnitude) {
  constexpr double kSafety = 8;
  const double terms =
      static_cast<double>(std::max<int64_t>(1, reduction_length));
  return kSafety * epsilon * std::sqrt(terms) * std::max(magnitude, 1e-30);
}

// Returns the tolerance of a value that was summed in f32 and stored in a dtype
// whose epsilon is `stored_epsilon`. `magnitude` is the largest intermediate
// number.
inline double StoredTolerance(double stored_epsilon, int64_t reduction_length,
                              double magnitude, double value) {
  return Tolerance(kEpsilonF32, reduction_length, magnitude) +
         stored_epsilon * std::abs(value);
}

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_TOLERANCE_H_
