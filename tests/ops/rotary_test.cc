#include "src/ops/rotary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/tolerance.h"

namespace weft::ops {
namespace {

using ::weft::testing::kEpsilonBf16;
using ::weft::testing::kEpsilonF32;
using ::weft::testing::Tolerance;

RotaryTable MakeTable(int64_t features, int64_t positions) {
  std::vector<double> frequencies(features / 2);
  for (size_t c = 0; c < frequencies.size(); ++c) {
    frequencies[c] = std::pow(10000.0, -2.0 * c / features);
  }
  return MakeRotaryTable(frequencies, positions, at::kCPU);
}

// Hugging Face's form: x cos + rotate_half(x) sin, in f64.
at::Tensor Dense(const at::Tensor& x, const at::Tensor& positions,
                 const RotaryTable& table) {
  const int64_t half = x.size(2) / 2;
  const at::Tensor rows = positions.to(at::kLong);
  const at::Tensor cos = table.cos_PC.index_select(0, rows).to(at::kDouble);
  const at::Tensor sin = table.sin_PC.index_select(0, rows).to(at::kDouble);
  const at::Tensor rotated =
      at::cat({-x.narrow(2, half, half), x.narrow(2, 0, half)}, 2);
  return x * at::cat({cos, cos}, 1).unsqueeze(1) +
         rotated * at::cat({sin, sin}, 1).unsqueeze(1);
}

class RotaryTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(RotaryTest, MatchesDenseFormAndItsInverseIsTheBackward) {
  const at::ScalarType dtype = GetParam();
  const double epsilon = dtype == at::kBFloat16 ? kEpsilonBf16 : kEpsilonF32;
  at::manual_seed(2);
  for (int64_t tokens : {0, 1, 37}) {
    for (int64_t features : {2, 34, 64}) {
      const RotaryTable table = MakeTable(features, 50);
      const at::Tensor positions = at::randint(0, 50, {tokens}, at::kInt);
      // Three heads inside a fused projection of five.
      at::Tensor fused =
          at::randn({tokens, 5, features}, at::kDouble).to(dtype);
      const at::Tensor before = fused.clone();
      at::Tensor x = fused.narrow(1, 1, 3);
      at::Tensor leaf = before.narrow(1, 1, 3)
                            .to(at::kDouble)
                            .detach()
                            .clone()
                            .requires_grad_(true);
      const at::Tensor y = Dense(leaf, positions, table);
      ApplyRotary(x, positions, table, false);
      EXPECT_TRUE(at::allclose(x.to(at::kDouble), y.detach(), 0,
                               Tolerance(epsilon, 2, 6)));
      EXPECT_TRUE(at::equal(fused.narrow(1, 0, 1), before.narrow(1, 0, 1)));
      EXPECT_TRUE(at::equal(fused.narrow(1, 4, 1), before.narrow(1, 4, 1)));
      at::Tensor gradient =
          at::randn({tokens, 3, features}, at::kDouble).to(dtype);
      (y * gradient.to(at::kDouble)).sum().backward();
      ApplyRotary(gradient, positions, table, true);
      EXPECT_TRUE(at::allclose(gradient.to(at::kDouble), leaf.grad(), 0,
                               Tolerance(epsilon, 2, 6)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, RotaryTest,
                         ::testing::Values(at::kFloat, at::kDouble,
                                           at::kBFloat16));

TEST(RotaryTableTest, HoldsCosineAndSineOfPositionTimesFrequency) {
  const RotaryTable table = MakeRotaryTable({1.0, 0.25}, 9, at::kCPU);
  EXPECT_FLOAT_EQ(table.cos_PC[8][1].item<float>(), std::cos(2.0F));
  EXPECT_FLOAT_EQ(table.sin_PC[3][0].item<float>(), std::sin(3.0F));
}

TEST(RotaryNanTest, StaysInItsToken) {
  const RotaryTable table = MakeTable(8, 4);
  at::Tensor x = at::ones({3, 2, 8});
  x[1][0][0] = std::nan("");
  ApplyRotary(x, at::tensor({0, 1, 2}, at::kInt), table, false);
  EXPECT_FALSE(x[0].isnan().any().item<bool>());
  EXPECT_FALSE(x[2].isnan().any().item<bool>());
}

TEST(RotaryRefusalTest, TableOfAnotherWidthThrows) {
  const RotaryTable table = MakeTable(8, 4);
  at::Tensor x = at::ones({1, 1, 10});
  EXPECT_THROW(ApplyRotary(x, at::zeros({1}, at::kInt), table, false),
               c10::Error);
}

}  // namespace
}  // namespace weft::ops
