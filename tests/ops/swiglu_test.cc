#include "src/ops/swiglu.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/tolerance.h"

namespace weft::ops {
namespace {

using ::weft::testing::kEpsilonBf16;
using ::weft::testing::kEpsilonF32;
using ::weft::testing::kEpsilonF64;
using ::weft::testing::Tolerance;

double EpsilonOf(at::ScalarType dtype) {
  if (dtype == at::kDouble) return kEpsilonF64;
  return dtype == at::kFloat ? kEpsilonF32 : kEpsilonBf16;
}

class SwiGluTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(SwiGluTest, MatchesAutograd) {
  const at::ScalarType dtype = GetParam();
  at::manual_seed(3);
  for (int64_t rows : {0, 1, 29}) {
    for (int64_t features : {1, 13, 64, 1537}) {
      at::Tensor gate_up =
          (at::randn({rows, 2 * features}, at::kDouble) * 3).to(dtype);
      const at::Tensor dout =
          at::randn({rows, features}, at::kDouble).to(dtype);
      at::Tensor leaf =
          gate_up.to(at::kDouble).detach().clone().requires_grad_(true);
      const at::Tensor y = at::silu(leaf.narrow(1, 0, features)) *
                           leaf.narrow(1, features, features);
      (y * dout.to(at::kDouble)).sum().backward();
      at::Tensor out = at::empty({rows, features}, dtype);
      SwiGlu(gate_up, out);
      SwiGluBackward(dout, gate_up);
      const double tolerance = Tolerance(EpsilonOf(dtype), 1, 150);
      EXPECT_TRUE(at::allclose(out.to(at::kDouble), y.detach(), 0, tolerance));
      EXPECT_TRUE(
          at::allclose(gate_up.to(at::kDouble), leaf.grad(), 0, tolerance));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, SwiGluTest,
                         ::testing::Values(at::kFloat, at::kDouble,
                                           at::kBFloat16));

TEST(SwiGluNanTest, StaysInItsElement) {
  at::Tensor gate_up = at::ones({3, 40});
  gate_up[1][5] = std::nan("");
  at::Tensor out = at::empty({3, 20});
  SwiGlu(gate_up, out);
  EXPECT_TRUE(out[1][5].isnan().item<bool>());
  EXPECT_EQ(out.isnan().sum().item<int64_t>(), 1);
}

TEST(SwiGluRefusalTest, MismatchedWidthsThrow) {
  at::Tensor out = at::empty({2, 5});
  EXPECT_THROW(SwiGlu(at::ones({2, 8}), out), c10::Error);
}

}  // namespace
}  // namespace weft::ops
