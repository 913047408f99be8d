#include "src/loss/adamw.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/tolerance.h"

namespace weft::loss {
namespace {

constexpr int kSteps = 10;

std::vector<double> Doubles(const at::Tensor& tensor) {
  const at::Tensor doubles = tensor.to(at::kDouble).contiguous();
  const double* data = doubles.const_data_ptr<double>();
  return {data, data + doubles.numel()};
}

// The published update, written literally, for one parameter at a time.
struct LiteralAdamW {
  std::vector<double> w, m, v;

  void Step(const AdamWConfig& c, int t, std::vector<double> g) {
    double square = 0;
    for (double x : g) square += x * x;
    if (c.max_grad_norm > 0) {
      const double coefficient =
          std::min(1.0, c.max_grad_norm / (std::sqrt(square) + 1e-6));
      for (double& x : g) x *= coefficient;
    }
    for (size_t i = 0; i < w.size(); ++i) {
      w[i] -= c.learning_rate * c.weight_decay * w[i];
      m[i] = c.beta1 * m[i] + (1 - c.beta1) * g[i];
      v[i] = c.beta2 * v[i] + (1 - c.beta2) * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(c.beta1, t));
      const double v_hat = v[i] / (1 - std::pow(c.beta2, t));
      w[i] -= c.learning_rate * m_hat / (std::sqrt(v_hat) + c.eps);
    }
  }
};

struct AdamWCase {
  std::string name;
  AdamWConfig config;
  at::ScalarType dtype;
};

class AdamWTest : public ::testing::TestWithParam<AdamWCase> {};

TEST_P(AdamWTest, FollowsTheLiteralFormulaOverTenSteps) {
  const auto& [name, config, dtype] = GetParam();
  at::manual_seed(7);
  for (int64_t count : {1, 17, 70000}) {
    at::Tensor in_place = at::randn({count}, dtype);
    at::Tensor weights = in_place.clone();
    at::Tensor m = at::zeros({count}, dtype), v = at::zeros({count}, dtype);
    at::Tensor m2 = m.clone(), v2 = v.clone();
    LiteralAdamW literal{Doubles(weights), Doubles(m), Doubles(v)};
    for (int step = 1; step <= kSteps; ++step) {
      const at::Tensor gradient = at::randn({count}, dtype);
      const double norm = GradientNorm(gradient);
      const at::Tensor before = weights.clone();
      at::Tensor next = at::empty_like(weights);
      AdamWStep(config, step, norm, weights, gradient, m, v, next);
      EXPECT_TRUE(at::equal(weights, before)) << "the old version changed";
      weights = next;
      AdamWStep(config, step, norm, in_place, gradient, m2, v2, in_place);
      literal.Step(config, step, Doubles(gradient));
    }
    EXPECT_TRUE(at::equal(weights, in_place));
    const double epsilon = dtype == at::kDouble ? kEpsilonF64 : kEpsilonF32;
    const double tolerance = Tolerance(epsilon, kSteps, 5);
    const std::vector<double> actual = Doubles(weights);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_NEAR(actual[i], literal.w[i], tolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Configs, AdamWTest,
    ::testing::Values(AdamWCase{"DefaultsInFloat", {}, at::kFloat},
                      AdamWCase{"DefaultsInDouble", {}, at::kDouble},
                      AdamWCase{"DecayInFloat",
                                {.learning_rate = 1e-2, .weight_decay = 0.1},
                                at::kFloat},
                      AdamWCase{"AllInFloat",
                                {.learning_rate = 1e-2,
                                 .beta2 = 0.999,
                                 .eps = 1e-8,
                                 .weight_decay = 0.1,
                                 .max_grad_norm = 0.5},
                                at::kFloat},
                      AdamWCase{"DecayAndClippingInDouble",
                                {.learning_rate = 1e-2,
                                 .weight_decay = 0.1,
                                 .max_grad_norm = 0.5},
                                at::kDouble}),
    [](const auto& test) { return test.param.name; });

TEST(AdamWClipTest, LeavesASmallGradientAlone) {
  const at::Tensor gradient = at::full({4}, 0.1F), weights = at::ones({4});
  at::Tensor clipped = at::empty({4}), plain = at::empty({4});
  at::Tensor m = at::zeros({4}), v = at::zeros({4});
  at::Tensor m2 = at::zeros({4}), v2 = at::zeros({4});
  const double norm = GradientNorm(gradient);
  AdamWStep({.max_grad_norm = 10}, 1, norm, weights, gradient, m, v, clipped);
  AdamWStep({}, 1, norm, weights, gradient, m2, v2, plain);
  EXPECT_TRUE(at::equal(clipped, plain));
}

TEST(AdamWRefusalTest, StepZeroThrows) {
  at::Tensor a = at::ones({2}), m = at::zeros({2}), v = at::zeros({2});
  EXPECT_THROW(AdamWStep({}, 0, 1, a, a, m, v, a), c10::Error);
}

TEST(AdamWEmptyTest, NoParametersIsValid) {
  at::Tensor none = at::empty({0});
  EXPECT_EQ(GradientNorm(none), 0);
  AdamWStep({}, 1, 0, none, none, none, none, none);
}

TEST(GradientNormTest, IsAccumulatedInF64) {
  // In f32 the many small squares would vanish beside the large one.
  at::Tensor gradient = at::full({1000000}, 1e-4F);
  gradient[0] = 1000.0F;
  const double expected = std::sqrt(1e6 + 999999 * std::pow(1e-4F, 2.0));
  EXPECT_NEAR(GradientNorm(gradient), expected, 1e-9 * expected);
}

TEST(GradientNormTest, IsNotFiniteForNanAndInfinity) {
  at::Tensor gradient = at::ones({100});
  gradient[99] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(GradientNorm(gradient)));
  gradient[99] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(GradientNorm(gradient)));
}

// In f32 the square of 1.9e19 is infinite, and that of 1.8e19 is not.
TEST(SquareFitsTest, IsThatOfTheClippedGradient) {
  EXPECT_TRUE(SquareFits(0, 1.8e19));
  EXPECT_FALSE(SquareFits(0, 1.9e19));
  EXPECT_TRUE(SquareFits(1, 1.9e19));
  EXPECT_TRUE(SquareFits(1e18, 1e38));
  EXPECT_FALSE(SquareFits(1e30, 1.9e19));
  EXPECT_FALSE(SquareFits(1, std::numeric_limits<double>::infinity()));
  EXPECT_FALSE(SquareFits(0, std::numeric_limits<double>::quiet_NaN()));
}

TEST(AdamWStepTest, RefusesWhatDoesNotFitAndChangesNothing) {
  at::Tensor weights = at::ones({8}), moment = at::ones({8});
  const auto error = [&](const at::Tensor& gradient, at::Tensor moment2,
                         at::Tensor out) -> std::string {
    try {
      AdamWStep({}, /*step=*/1, /*grad_norm=*/1, weights, gradient, moment,
                moment2, out);
    } catch (const c10::Error& refused) {
      return refused.what_without_backtrace();
    }
    return "";
  };
  const at::Tensor good = at::ones({8});
  EXPECT_EQ(error(at::ones({7}), good, weights).substr(0, 24),
            "gradient_N is Float [7] ");
  EXPECT_EQ(error(good, good.to(at::kDouble), weights).substr(0, 19),
            "moment2_N is Double");
  EXPECT_EQ(error(good, good, at::ones({16}).slice(0, 0, 16, 2)).substr(0, 31),
            "weights_out_N is not contiguous");
  EXPECT_TRUE(at::equal(weights, good));
  EXPECT_TRUE(at::equal(moment, good));
  EXPECT_THROW((void)GradientNorm(at::ones({16}).slice(0, 0, 16, 2)),
               c10::Error);
}

TEST(CudaAdamWStepTest, IsThatOfTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(8);
  const AdamWConfig config = {.weight_decay = 0.1, .max_grad_norm = 0.5};
  const at::Tensor weights = at::randn({70000}), gradient = at::randn({70000});
  const auto run = [&](at::TensorOptions options) {
    const at::Tensor w = weights.to(options), g = gradient.to(options);
    at::Tensor m = at::zeros_like(w), v = at::zeros_like(w);
    at::Tensor out = at::empty_like(w);
    AdamWStep(config, /*step=*/1, GradientNorm(g), w, g, m, v, out);
    return at::stack({out, m, v}).cpu().to(at::kDouble);
  };
  EXPECT_TRUE(at::allclose(run(at::TensorOptions(at::kCUDA).dtype(at::kFloat)),
                           run(at::TensorOptions(at::kDouble)), 0,
                           Tolerance(kEpsilonF32, 1, 5)));
  EXPECT_NEAR(GradientNorm(gradient.to(at::kCUDA)), GradientNorm(gradient),
              Tolerance(kEpsilonF64, 70000, 300));
}

}  // namespace
}  // namespace weft::loss
