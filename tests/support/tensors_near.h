// Compares tensors by the rule of tolerance.h.
#ifndef WEFT_TESTS_SUPPORT_TENSORS_NEAR_H_
#define WEFT_TESTS_SUPPORT_TENSORS_NEAR_H_

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "tests/support/tolerance.h"

namespace weft {

inline double EpsilonOf(at::ScalarType dtype) {
  if (dtype == at::kDouble) return kEpsilonF64;
  return dtype == at::kFloat ? kEpsilonF32 : kEpsilonBf16;
}

// Returns the largest magnitude; 0 if there are no numbers.
inline double MaxAbs(const at::Tensor& x) {
  return x.numel() == 0 ? 0 : x.abs().max().item<double>();
}

// Returns the largest difference in f64. The tensors may be on any device.
inline double MaxDifference(const at::Tensor& a, const at::Tensor& b) {
  return MaxAbs(a.to(at::kCPU, at::kDouble) - b.to(at::kCPU, at::kDouble));
}

// Expects that the difference is at most Tolerance(epsilon, reduction,
// magnitude). The magnitude is that of `expected`, but at least `least`.
inline void ExpectNear(const at::Tensor& actual, const at::Tensor& expected,
                       double epsilon, int64_t reduction,
                       std::string_view what = "", double least = 1) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_LE(MaxDifference(actual, expected),
            Tolerance(epsilon, reduction, std::max(least, MaxAbs(expected))))
      << what;
}

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_TENSORS_NEAR_H_
