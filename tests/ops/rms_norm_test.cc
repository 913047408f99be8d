#include "src/ops/rms_norm.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/dtype_name.h"
#include "tests/support/tensors_near.h"

namespace weft::ops::rms_norm_test {
namespace {

constexpr double kEps = 1e-5;

struct Oracle {
  at::Tensor y;
  at::Tensor dx;
};

// Computes the textbook formula under f64 autograd.
Oracle DenseOracle(const at::Tensor& x, const at::Tensor& weight,
                   const at::Tensor& dy) {
  at::Tensor leaf = x.to(at::kDouble).detach().clone().requires_grad_(true);
  const at::Tensor y = leaf * (leaf.pow(2).mean(1, true) + kEps).rsqrt() *
                       weight.to(at::kDouble);
  (y * dy.to(at::kDouble)).sum().backward();
  return {y.detach(), leaf.grad()};
}

class RmsNormTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(RmsNormTest, MatchesAutogradForAnyShapeAndRowStride) {
  const at::ScalarType dtype = GetParam();
  at::manual_seed(1);
  for (int64_t rows : {0, 1, 3, 70}) {
    for (int64_t features : {1, 5, 64, 576, 1001}) {
      // The tensors are views of wider ones, so the row stride is not D.
      const at::Tensor wide =
          at::randn({rows, features + 7}, at::kDouble).to(dtype);
      const at::Tensor x = wide.narrow(1, 3, features);
      const at::Tensor weight = at::randn({features}, at::kDouble).to(dtype);
      const at::Tensor dy = at::randn({rows, 2 * features}, at::kDouble)
                                .to(dtype)
                                .narrow(1, features, features);
      at::Tensor y =
          at::zeros({rows, features + 2}, dtype).narrow(1, 1, features);
      at::Tensor dx =
          at::ones({rows, features + 1}, dtype).narrow(1, 0, features);
      RmsNorm(x, weight, kEps, y);
      RmsNormBackward(dy, x, weight, kEps, dx);
      const Oracle oracle = DenseOracle(x, weight, dy);
      // With one feature, the norm x / |x| is constant. In its gradient, terms
      // of size dy / |x| cancel, but their rounding errors remain.
      double scale = 16;
      if (features == 1 && rows > 0) {
        scale += 16 / x.to(at::kDouble).abs().min().item<double>();
      }
      const double tolerance = Tolerance(EpsilonOf(dtype), features, scale);
      EXPECT_LE(MaxDifference(y, oracle.y), tolerance);
      EXPECT_LE(MaxDifference(dx, oracle.dx + 1), tolerance)
          << rows << " x " << features;
    }
  }
}

TEST_P(RmsNormTest, ASumIsNormedWithTheBitsOfTwoSteps) {
  const at::ScalarType dtype = GetParam();
  at::manual_seed(2);
  for (const int64_t rows : {0, 1, 70}) {
    const at::Tensor x = at::randn({rows, 77}, at::kDouble).to(dtype);
    const at::Tensor weight = at::randn({77}, at::kDouble).to(dtype);
    at::Tensor sum =
        at::randn({rows, 80}, at::kDouble).to(dtype).narrow(1, 2, 77);
    const at::Tensor expected_sum = sum + x;
    at::Tensor expected = at::empty_like(x), y = at::empty_like(x);
    RmsNorm(expected_sum, weight, kEps, expected);
    AddRmsNorm(x, weight, kEps, sum, y);
    EXPECT_TRUE(at::equal(sum, expected_sum));
    EXPECT_TRUE(at::equal(y, expected));
  }
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, RmsNormTest,
                         ::testing::Values(at::kFloat, at::kDouble,
                                           at::kBFloat16),
                         weft::testing::DtypeName);

TEST(RmsNormInPlaceTest, OutputMayBeTheInput) {
  at::Tensor x = at::randn({5, 33});
  const at::Tensor weight = at::randn({33});
  at::Tensor y = at::empty_like(x);
  RmsNorm(x, weight, kEps, y);
  RmsNorm(x, weight, kEps, x);
  EXPECT_TRUE(at::equal(x, y));
}

TEST(RmsNormNanTest, StaysInItsRow) {
  at::Tensor x = at::randn({4, 40});
  const at::Tensor weight = at::ones({40});
  at::Tensor clean = at::empty_like(x), y = at::empty_like(x);
  RmsNorm(x, weight, kEps, clean);
  x[2][39] = std::nan("");
  RmsNorm(x, weight, kEps, y);
  EXPECT_TRUE(y[2].isnan().all().item<bool>());
  for (int64_t row : {0, 1, 3}) EXPECT_TRUE(at::equal(y[row], clean[row]));
}

TEST(RmsNormRefusalTest, WeightOfAnotherWidthThrows) {
  at::Tensor x = at::randn({2, 8}), y = at::empty({2, 8});
  EXPECT_THROW(RmsNorm(x, at::ones({7}), kEps, y), c10::Error);
}

}  // namespace
}  // namespace weft::ops::rms_norm_test
