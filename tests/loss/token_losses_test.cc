#include "src/loss/token_losses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "src/request/train.h"

namespace weft::loss {
namespace {

using ::testing::ElementsAre;
using ::testing::Key;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Result {
  std::vector<float> losses;
  std::vector<float> gradients;
  std::map<std::string, double> metrics;
};

Result Compute(const LossConfig& config, const Datum& datum,
               const std::vector<float>& logprobs) {
  Result result{std::vector<float>(logprobs.size(), kNan),
                std::vector<float>(logprobs.size(), kNan),
                {}};
  MetricSums metrics;
  ComputeTokenLosses(config, datum, logprobs, absl::MakeSpan(result.losses),
                     absl::MakeSpan(result.gradients), &metrics);
  result.metrics = metrics.Metrics();
  return result;
}

// Makes tokens with ratios on both sides of the default clip range, with both
// signs of advantage and weight. One token is not scored. No ratio is within
// 1e-3 of a bound, because difference quotients are wrong there.
Datum PolicyDatum() {
  return {.tokens = {1, 2, 3, 4, 5, 6, 7},
          .targets = {2, 3, 4, 5, 6, 7, 8},
          .weights = {1, 1, -0.5, 2, 1, 0, 1},
          .logprobs = {-1.0, -2.0, -0.5, -1.5, -3.0, -1.0, -0.75},
          .advantages = {1.0, -2.0, 0.5, 1.5, -1.0, 9.0, 0.0}};
}

const std::vector<float> kPolicyLogprobs = {-1.0625F, -1.25F, -0.125F, -2.5F,
                                            -4.0F,    -7.0F,  -0.5F};

class PolicyLossTest : public ::testing::TestWithParam<LossFunction> {};

std::string LossName(const ::testing::TestParamInfo<LossFunction>& test) {
  switch (test.param) {
    case LossFunction::kCrossEntropy:
      return "CrossEntropy";
    case LossFunction::kCustom:
      return "Custom";
    case LossFunction::kImportanceSampling:
      return "ImportanceSampling";
    case LossFunction::kPpo:
      return "Ppo";
    case LossFunction::kCispo:
      return "Cispo";
    case LossFunction::kDro:
      return "Dro";
    case LossFunction::kGspo:
      return "Gspo";
    case LossFunction::kStableReinforce:
      return "StableReinforce";
    default:
      return "Unknown";
  }
}

double SequenceRatio(const Datum& datum, const std::vector<float>& logprobs) {
  double sum = 0, count = 0;
  for (size_t i = 0; i < logprobs.size(); ++i) {
    if (datum.weights[i] == 0) continue;
    sum += static_cast<double>(logprobs[i]) - datum.logprobs[i];
    count += 1;
  }
  return std::exp(sum / count);
}

// Computes the formula of one token in f64, without the code under test.
// `constant_lp` is the lp inside a stopgrad.
double Formula(LossFunction function, const Datum& datum, size_t t, double lp,
               const std::vector<float>& constant_lp) {
  const double A = datum.advantages[t];
  const double q = datum.logprobs[t];
  const double w = datum.weights[t];
  const auto clip = [](double r) { return std::min(std::max(r, 0.8), 1.2); };
  const double r = std::exp(lp - q);
  switch (function) {
    case LossFunction::kImportanceSampling:
      return -w * r * A;
    case LossFunction::kPpo:
      return -w * std::min(r * A, clip(r) * A);
    case LossFunction::kCispo:
      return -w * clip(std::exp(constant_lp[t] - q)) * lp * A;
    case LossFunction::kDro:
      return -w * (lp * A - 0.05 / 2 * (lp - q) * (lp - q));
    case LossFunction::kGspo: {
      const double s =
          SequenceRatio(datum, constant_lp) * std::exp(lp - constant_lp[t]);
      return -w * std::min(s * A, clip(s) * A);
    }
    case LossFunction::kStableReinforce: {
      const double s = std::min(SequenceRatio(datum, constant_lp), 1.2);
      return -w * (s * lp * A - 0.05 / 2 * (lp - q) * (lp - q));
    }
    default:
      return kNan;
  }
}

TEST_P(PolicyLossTest, MatchesFormulaAndItsCentralDifference) {
  const Datum datum = PolicyDatum();
  for (const float shift : {0.0F, 0.5F, -0.5F}) {
    std::vector<float> logprobs = kPolicyLogprobs;
    for (float& lp : logprobs) lp += shift;
    const Result result = Compute({.function = GetParam()}, datum, logprobs);
    for (size_t t = 0; t < logprobs.size(); ++t) {
      SCOPED_TRACE(t);
      const double step = 1e-5;
      const double high =
          Formula(GetParam(), datum, t, logprobs[t] + step, logprobs);
      const double low =
          Formula(GetParam(), datum, t, logprobs[t] - step, logprobs);
      const double loss = Formula(GetParam(), datum, t, logprobs[t], logprobs);
      EXPECT_NEAR(result.losses[t], loss, 1e-6 * (1 + std::abs(loss)));
      const double slope = (high - low) / (2 * step);
      EXPECT_NEAR(result.gradients[t], slope, 1e-6 * (1 + std::abs(slope)));
    }
  }
}

TEST_P(PolicyLossTest, SkipsTokensOfWeightZeroWhateverTheyHold) {
  const Datum datum = PolicyDatum();
  std::vector<float> logprobs = kPolicyLogprobs;
  const Result expected = Compute({.function = GetParam()}, datum, logprobs);
  logprobs[5] = kNan;
  const Result result = Compute({.function = GetParam()}, datum, logprobs);
  EXPECT_EQ(result.losses, expected.losses);
  EXPECT_EQ(result.gradients, expected.gradients);
  EXPECT_EQ(result.metrics, expected.metrics);
  EXPECT_EQ(result.losses[5], 0);
  EXPECT_EQ(result.gradients[5], 0);
  EXPECT_EQ(result.metrics.at("tokens:sum"), 6);
}

TEST_P(PolicyLossTest, StaysFiniteForAnyRatio) {
  Datum datum = PolicyDatum();
  for (const float lp : {-1e4F, 1e4F, -kInfinity}) {
    std::vector<float> logprobs(datum.tokens.size(), lp);
    // These losses contain lp itself.
    const bool has_lp = GetParam() == LossFunction::kCispo ||
                        GetParam() == LossFunction::kDro ||
                        GetParam() == LossFunction::kStableReinforce;
    if (has_lp && std::isinf(lp)) continue;
    const Result result = Compute({.function = GetParam()}, datum, logprobs);
    for (size_t t = 0; t < logprobs.size(); ++t) {
      EXPECT_TRUE(std::isfinite(result.losses[t])) << lp << " " << t;
      EXPECT_TRUE(std::isfinite(result.gradients[t])) << lp << " " << t;
    }
  }
}

// A log ratio of 89, which a stale sampler gives, counts as 20. There it is a
// constant, so only cispo and stable_reinforce, whose ratios are constants
// anyway, have a gradient.
TEST_P(PolicyLossTest, BoundsAStaleTokensRatio) {
  const bool is_dro = GetParam() == LossFunction::kDro;
  const LossConfig config{
      .function = GetParam(), .clip_high = 1e30, .beta = is_dro ? 0.05 : 0};
  const Datum datum{.tokens = {1, 2},
                    .targets = {2, 3},
                    .weights = {2, 0},
                    .logprobs = {-90, -1},
                    .advantages = {-0.5, 1}};
  const Result result = Compute(config, datum, {-1, -1});
  if (is_dro) {
    EXPECT_FALSE(result.metrics.contains("bounded_tokens:sum"));
    EXPECT_FLOAT_EQ(result.gradients[0], -2 * (-0.5F - 0.05F * 89));
    return;
  }
  const bool is_constant = GetParam() == LossFunction::kCispo ||
                           GetParam() == LossFunction::kStableReinforce;
  const auto bounded = static_cast<float>(std::exp(20.0));
  EXPECT_FLOAT_EQ(result.losses[0], is_constant ? -bounded : bounded);
  EXPECT_FLOAT_EQ(result.gradients[0], is_constant ? bounded : 0);
  EXPECT_EQ(result.metrics.at("bounded_tokens:sum"), 1);
  EXPECT_EQ(
      Compute(config, datum, {-70.5F, -1}).metrics.at("bounded_tokens:sum"), 0);
}

TEST_P(PolicyLossTest, DoesNotHideNan) {
  std::vector<float> logprobs = kPolicyLogprobs;
  logprobs[0] = kNan;
  const Result result =
      Compute({.function = GetParam()}, PolicyDatum(), logprobs);
  EXPECT_TRUE(std::isnan(result.losses[0]));
  EXPECT_TRUE(std::isnan(result.metrics.at("loss:sum")));
}

TEST_P(PolicyLossTest, OnPolicyGradientIsMinusWeightTimesAdvantage) {
  Datum datum = PolicyDatum();
  const Result result =
      Compute({.function = GetParam()}, datum, datum.logprobs);
  for (size_t t = 0; t < datum.tokens.size(); ++t) {
    EXPECT_FLOAT_EQ(result.gradients[t],
                    -datum.weights[t] * datum.advantages[t]);
  }
  EXPECT_EQ(result.metrics.at("ratio:mean"), 1);
  EXPECT_EQ(result.metrics.at("kl_sample_train_v1:mean"), 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, PolicyLossTest,
    ::testing::Values(LossFunction::kImportanceSampling, LossFunction::kPpo,
                      LossFunction::kCispo, LossFunction::kDro,
                      LossFunction::kGspo, LossFunction::kStableReinforce),
    LossName);

TEST(CrossEntropyTest, IsMinusWeightedLogprobForAnySign) {
  const Datum datum{.tokens = {1, 2, 3},
                    .targets = {2, 3, 4},
                    .weights = {1, -2, 0},
                    .logprobs = {},
                    .advantages = {}};
  const Result result = Compute({}, datum, {-1, -3, kNan});
  EXPECT_THAT(result.losses, ElementsAre(1, -6, 0));
  EXPECT_THAT(result.gradients, ElementsAre(-1, 2, 0));
  EXPECT_EQ(result.metrics.at("loss:sum"), -5);
  EXPECT_THAT(result.metrics,
              UnorderedElementsAre(Key("loss:sum"), Key("tokens:sum")));
}

TEST(CrossEntropyTest, TakesAbsentWeightsAsOne) {
  const Datum datum{.tokens = {1, 2},
                    .targets = {2, 3},
                    .weights = {},
                    .logprobs = {},
                    .advantages = {}};
  const Result result = Compute({}, datum, {-1, -3});
  EXPECT_THAT(result.losses, ElementsAre(1, 3));
  EXPECT_THAT(result.gradients, ElementsAre(-1, -1));
}

TEST(CrossEntropyTest, TakesSeveralTargetsPerToken) {
  const Datum datum{.tokens = {1, 2},
                    .targets = {2, 3, 4, 5, 6, 7},
                    .weights = {0.5, 0.25, 0.25, 1, 0, -1},
                    .logprobs = {},
                    .advantages = {},
                    .targets_per_token = 3};
  const Result result = Compute({}, datum, {-1, -2, -4, -8, kNan, -3});
  EXPECT_THAT(result.losses, ElementsAre(0.5, 0.5, 1, 8, 0, -3));
  EXPECT_THAT(result.gradients, ElementsAre(-0.5, -0.25, -0.25, -1, 0, 1));
  EXPECT_EQ(result.metrics.at("loss:sum"), 7);
}

TEST(CrossEntropyTest, TakesRaggedTargets) {
  const Datum datum{.tokens = {1, 2, 3},
                    .targets = {2, 3, 4},
                    .weights = {0.5, 0.25, -1},
                    .logprobs = {},
                    .advantages = {},
                    .target_offsets = {0, 2, 2, 3}};
  const Result result = Compute({}, datum, {-1, -2, -4});
  EXPECT_THAT(result.losses, ElementsAre(0.5, 0.5, -4));
  EXPECT_THAT(result.gradients, ElementsAre(-0.5, -0.25, 1));
  EXPECT_EQ(result.metrics.at("loss:sum"), -3);
  EXPECT_EQ(result.metrics.at("tokens:sum"), 3);
}

// The ratio is exactly 1 and both bounds are 1, so both branches of min are
// equal.
TEST(ClipTest, TakesUnclippedBranchOnTie) {
  const LossConfig config{
      .function = LossFunction::kPpo, .clip_low = 1, .clip_high = 1};
  const Datum datum{.tokens = {1, 2},
                    .targets = {2, 3},
                    .weights = {},
                    .logprobs = {-1, -1},
                    .advantages = {2, -2}};
  const Result result = Compute(config, datum, {-1, -1});
  EXPECT_THAT(result.gradients, ElementsAre(-2, 2));
  EXPECT_EQ(result.metrics.at("clip_fraction:mean"), 0);
}

TEST(ClipTest, StopsGradientOnlyWhereClippingBinds) {
  const Datum datum{.tokens = {1, 2, 3, 4},
                    .targets = {2, 3, 4, 5},
                    .weights = {},
                    .logprobs = {-1, -1, -1, -1},
                    .advantages = {1, -1, 1, -1}};
  const std::vector<float> logprobs = {-0.5, -0.5, -1.5, -1.5};
  const Result result =
      Compute({.function = LossFunction::kPpo}, datum, logprobs);
  EXPECT_EQ(result.gradients[0], 0);
  EXPECT_FLOAT_EQ(result.gradients[1], std::exp(0.5F));
  EXPECT_FLOAT_EQ(result.gradients[2], -std::exp(-0.5F));
  EXPECT_EQ(result.gradients[3], 0);
  EXPECT_EQ(result.metrics.at("clip_fraction:mean"), 1);
}

TEST(TeacherLossTest, IsTheWeightTimesTheDivergence) {
  const Datum datum{.tokens = {1, 2, 3},
                    .targets = {2, 3, 4},
                    .weights = {0.5, 0, -2},
                    .logprobs = {},
                    .advantages = {}};
  const std::vector<float> divergences = {3, std::nanf(""), 0.25};
  std::vector<float> losses(3), gradients(3);
  MetricSums metrics;
  ComputeTeacherLosses(datum, divergences, absl::MakeSpan(losses),
                       absl::MakeSpan(gradients), &metrics);
  EXPECT_THAT(losses, ElementsAre(1.5, 0, -0.5));
  EXPECT_THAT(gradients, ElementsAre(0.5, 0, -2));
  EXPECT_THAT(metrics.Metrics(),
              UnorderedElementsAre(Pair("loss:sum", 1), Pair("tokens:sum", 2),
                                   Pair("kl:mean", 3.25 / 2)));
}

TEST(MetricsTest, AddUpOverDataAndLeaveOutEmptyMeans) {
  const LossConfig config{.function = LossFunction::kImportanceSampling};
  Datum datum{.tokens = {1, 2},
              .targets = {2, 3},
              .weights = {1, 0},
              .logprobs = {-1, -1},
              .advantages = {1, 1}};
  MetricSums metrics;
  std::vector<float> losses(2), gradients(2);
  const std::vector<float> first = {-2, -5}, second = {-1, -5};
  ComputeTokenLosses(config, datum, first, absl::MakeSpan(losses),
                     absl::MakeSpan(gradients), &metrics);
  ComputeTokenLosses(config, datum, second, absl::MakeSpan(losses),
                     absl::MakeSpan(gradients), &metrics);
  EXPECT_EQ(metrics.Metrics().at("tokens:sum"), 2);
  EXPECT_EQ(metrics.Metrics().at("kl_sample_train_v1:mean"), 0.5);
  EXPECT_DOUBLE_EQ(metrics.Metrics().at("ratio:mean"),
                   (std::exp(-1.0) + 1) / 2);

  MetricSums empty;
  EXPECT_THAT(empty.Metrics(), UnorderedElementsAre(Key("loss:sum")));
  datum.weights = {0, 0};
  ComputeTokenLosses(config, datum, first, absl::MakeSpan(losses),
                     absl::MakeSpan(gradients), &empty);
  EXPECT_THAT(empty.Metrics(),
              UnorderedElementsAre(Key("loss:sum"), Key("tokens:sum"),
                                   Key("bounded_tokens:sum")));
}

}  // namespace
}  // namespace weft::loss
