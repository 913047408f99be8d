#include "src/sampling/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/support/tolerance.h"

namespace weft::sampling {
namespace {

// Draws a token. REQUIRES: the logits allow a draw.
DrawResult Draw(absl::Span<const float> logits, const DrawConfig& config,
                float uniform) {
  return DrawToken(logits, config, uniform).value();
}

using ::testing::ElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kJustBelowOne = 1.0F - 0x1p-24F;

// Returns logits that are distributed roughly like a bell. A counter-based
// generator makes them, so every run has the same logits.
std::vector<float> SomeLogits(size_t vocab, float spread) {
  std::vector<float> logits(vocab);
  for (size_t i = 0; i < vocab; ++i) {
    float sum = 0;
    for (uint32_t k = 0; k < 4; ++k) {
      sum += CounterUniform(7, static_cast<uint32_t>(i), k) - 0.5F;
    }
    logits[i] = spread * sum;
  }
  return logits;
}

std::vector<double> Softmax(const std::vector<float>& logits,
                            double temperature) {
  const double max = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  for (const float x : logits) p.push_back(std::exp((x - max) / temperature));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= sum;
  return p;
}

// Counts how often each token is drawn for evenly spaced uniforms, including
// the ends.
std::vector<int> Counts(const std::vector<float>& logits,
                        const DrawConfig& config, int draws) {
  std::vector<int> counts(logits.size(), 0);
  for (int i = 0; i < draws; ++i) {
    const float u = std::min(static_cast<float>(i) / draws, kJustBelowOne);
    ++counts[Draw(logits, config, u).token];
  }
  ++counts[Draw(logits, config, kJustBelowOne).token];
  return counts;
}

std::set<int> Support(const std::vector<float>& logits,
                      const DrawConfig& config) {
  const std::vector<int> counts = Counts(logits, config, 2000);
  std::set<int> support;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) support.insert(static_cast<int>(i));
  }
  return support;
}

TEST(PhiloxTest, GivesTheKnownAnswers) {
  EXPECT_THAT(Philox4x32({0, 0, 0, 0}, {0, 0}),
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(Philox4x32({~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}),
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                         {0xa4093822, 0x299f31d0}),
              ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(CounterUniformTest, DependsOnEveryArgumentAndStaysBelowOne) {
  const float base = CounterUniform(1, 2, 3);
  EXPECT_EQ(CounterUniform(1, 2, 3), base);
  EXPECT_NE(CounterUniform(2, 2, 3), base);
  EXPECT_NE(CounterUniform(uint64_t{1} << 40 | 1, 2, 3), base);
  EXPECT_NE(CounterUniform(1, 3, 3), base);
  EXPECT_NE(CounterUniform(1, 2, 4), base);
  double sum = 0;
  constexpr int kDraws = 20000;
  for (uint32_t i = 0; i < kDraws; ++i) {
    const float u = CounterUniform(5, 0, i);
    ASSERT_GE(u, 0.0F);
    ASSERT_LT(u, 1.0F);
    sum += u;
  }
  // The bound is five standard deviations of the mean of kDraws uniforms.
  EXPECT_NEAR(sum / kDraws, 0.5, 5 * std::sqrt(1.0 / 12 / kDraws));
}

struct DistributionCase {
  std::string name;
  size_t vocab;
  DrawConfig config;
};

class DistributionTest : public ::testing::TestWithParam<DistributionCase> {};

// Pearson's statistic compares draws with the exact distribution. Its mean is
// the number d of degrees of freedom, and its deviation sqrt(2 d). Five
// deviations are exceeded once in millions of runs, and the generator is fixed,
// so the test never fails by chance.
TEST_P(DistributionTest, DrawsMatchTheSoftmaxByChiSquare) {
  const auto& [name, vocab, config] = GetParam();
  const std::vector<float> logits = SomeLogits(vocab, 3);
  const std::vector<double> p = Softmax(logits, config.temperature);
  constexpr int kDraws = 10000;
  std::vector<int> counts(vocab, 0);
  for (uint32_t i = 0; i < kDraws; ++i) {
    ++counts[Draw(logits, config, CounterUniform(11, 0, i)).token];
  }
  double statistic = 0;
  for (size_t i = 0; i < vocab; ++i) {
    const double expected = kDraws * p[i];
    statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  const double freedom = static_cast<double>(vocab) - 1;
  EXPECT_LT(std::abs(statistic - freedom), 5 * std::sqrt(2 * freedom));
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, DistributionTest,
    ::testing::Values(DistributionCase{"Vocab2", 2, {}},
                      DistributionCase{"Vocab17", 17, {}},
                      DistributionCase{"Vocab511", 511, {}},
                      DistributionCase{"Vocab513", 513, {}},
                      DistributionCase{"Vocab1100", 1100, {}},
                      DistributionCase{"Temperature2", 300, {.temperature = 2}},
                      // These filters keep all tokens, but draw from them in
                      // order of likelihood.
                      DistributionCase{"TopKKeepsAll", 300, {.top_k = 300}},
                      DistributionCase{
                          "TopPKeepsAll", 300, {.top_p = 1 - 1e-12}},
                      DistributionCase{"MinPKeepsAll", 300, {.min_p = 1e-9}}),
    [](const auto& test) { return test.param.name; });

TEST(DrawTokenTest, ReportsLogprobOfUnfilteredScaledDistribution) {
  for (const size_t vocab : {size_t{5}, size_t{1000}, size_t{50257}}) {
    const std::vector<float> logits = SomeLogits(vocab, 8);
    for (const double temperature : {0.5, 1.0, 3.0}) {
      const std::vector<double> p = Softmax(logits, temperature);
      const DrawConfig config{
          .temperature = temperature, .top_k = 4, .top_p = 0.9, .min_p = 0.01};
      const DrawResult result = Draw(logits, config, 0.7F);
      EXPECT_NEAR(result.logprob, std::log(p[result.token]), 2e-6);
    }
  }
}

TEST(DrawTokenTest, GreedyTakesLowestIdOnTieAndLogprobAtTemperatureOne) {
  const std::vector<float> logits = {1, 3, 2, 3};
  const DrawResult result = Draw(logits, {.temperature = 0}, 0.99F);
  EXPECT_EQ(result.token, 1);
  EXPECT_NEAR(result.logprob, std::log(Softmax(logits, 1)[1]), 1e-6);
  EXPECT_EQ(
      Draw(logits, {.temperature = 0, .top_k = 2, .top_p = 0.1}, 0.5F).token,
      1);
}

TEST(DrawTokenTest, DrawsNothingFromLogitsThatAreNotFinite) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> cases[] = {
      std::vector<float>(1000, kNan), {0, kNan, 1}, {0, kInf}, {-kInf, -kInf}};
  for (const std::vector<float>& logits : cases) {
    for (const DrawConfig& config :
         {DrawConfig{.temperature = 0}, DrawConfig{}, DrawConfig{.top_k = 1},
          DrawConfig{.top_p = 0.5}, DrawConfig{.min_p = 0.5}}) {
      EXPECT_FALSE(DrawToken(logits, config, 0.5F).has_value());
    }
  }
}

TEST(DrawTokenTest, TopKKeepsTheLikeliestAndLowerIdsOnTie) {
  const std::vector<float> logits = {0, 1, 1, 1, -1};
  EXPECT_THAT(Support(logits, {.top_k = 1}), ElementsAre(1));
  EXPECT_THAT(Support(logits, {.top_k = 2}), ElementsAre(1, 2));
  EXPECT_THAT(Support(logits, {.top_k = 4}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Support(logits, {.top_k = 99}), ElementsAre(0, 1, 2, 3, 4));
}

TEST(DrawTokenTest, TopPKeepsTheShortestPrefixThatReachesIt) {
  // The probabilities are 0.5, 0.25, 0.125, 0.125.
  const float ln2 = std::log(2.0F);
  const std::vector<float> logits = {-2 * ln2, -ln2, -3 * ln2, -3 * ln2};
  EXPECT_THAT(Support(logits, {.top_p = 0.4}), ElementsAre(1));
  EXPECT_THAT(Support(logits, {.top_p = 0.6}), ElementsAre(0, 1));
  EXPECT_THAT(Support(logits, {.top_p = 0.8}), ElementsAre(0, 1, 2));
  EXPECT_THAT(Support(logits, {.top_p = 0.9}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Support(logits, {.top_p = 1e-9}), ElementsAre(1));
}

TEST(DrawTokenTest, TopPCountsWithinWhatTopKKept) {
  const float ln2 = std::log(2.0F);
  const std::vector<float> logits = {-ln2, -2 * ln2, -3 * ln2, -3 * ln2};
  // The first token has 2/3 of the weight of the best two tokens, so it reaches
  // a top_p of 0.6 alone. Among all tokens, it has only half of the weight.
  EXPECT_THAT(Support(logits, {.top_k = 2, .top_p = 0.6}), ElementsAre(0));
  EXPECT_THAT(Support(logits, {.top_k = 2, .top_p = 0.7}), ElementsAre(0, 1));
}

TEST(DrawTokenTest, MinPKeepsTokensThatAreLikelyEnough) {
  // The probabilities over that of the first token: 1, 1/2, 1/4, 1/8.
  const float ln2 = std::log(2.0F);
  const std::vector<float> logits = {-ln2, -2 * ln2, -3 * ln2, -4 * ln2};
  EXPECT_THAT(Support(logits, {.min_p = 1}), ElementsAre(0));
  EXPECT_THAT(Support(logits, {.min_p = 0.3}), ElementsAre(0, 1));
  EXPECT_THAT(Support(logits, {.min_p = 0.2}), ElementsAre(0, 1, 2));
  EXPECT_THAT(Support(logits, {.min_p = 0.1}), ElementsAre(0, 1, 2, 3));
  // The ratios are those at the temperature of the draw.
  EXPECT_THAT(Support(logits, {.temperature = 0.5, .min_p = 0.3}),
              ElementsAre(0));
  EXPECT_THAT(Support(logits, {.temperature = 2, .min_p = 0.3}),
              ElementsAre(0, 1, 2, 3));
}

TEST(DrawTokenTest, MinPDoesNotChangeWhatTopKAndTopPKeep) {
  const float ln2 = std::log(2.0F);
  const std::vector<float> logits = {-ln2, -2 * ln2, -3 * ln2, -4 * ln2};
  EXPECT_THAT(Support(logits, {.top_k = 2, .min_p = 0.2}), ElementsAre(0, 1));
  EXPECT_THAT(Support(logits, {.top_k = 4, .min_p = 0.3}), ElementsAre(0, 1));
  // The first two tokens have 12/15 of all weight, and 12/14 of the weight of
  // those that min_p keeps. So the order of the filters shows.
  EXPECT_THAT(Support(logits, {.top_p = 0.82, .min_p = 0.2}),
              ElementsAre(0, 1, 2));
  EXPECT_THAT(Support(logits, {.top_p = 0.82, .min_p = 0.4}),
              ElementsAre(0, 1));
}

// The support has exactly the tokens that are drawn for some uniform, and the
// truncated log-probabilities are those among them.
TEST(DrawTokenTest, TruncatedResultsAreThoseOfTheKeptTokens) {
  const std::vector<float> logits = SomeLogits(40, 4);
  for (DrawConfig config : {DrawConfig{.top_k = 5}, DrawConfig{.top_p = 0.8},
                            DrawConfig{.temperature = 0.7, .min_p = 0.1},
                            DrawConfig{.top_k = 9, .top_p = 0.9, .min_p = 0.05},
                            DrawConfig{.top_p = 1e-9}}) {
    const std::set<int> kept = Support(logits, config);
    config.truncated_logprobs = config.support = true;
    config.top_logprobs = 6;
    const DrawResult result = Draw(logits, config, 0.4F);
    EXPECT_THAT(result.support, ::testing::ElementsAreArray(kept));
    const std::vector<double> p = Softmax(logits, config.temperature);
    double total = 0;
    for (const int token : kept) total += p[token];
    EXPECT_NEAR(result.logprob, std::log(p[result.token] / total), 1e-6);
    ASSERT_EQ(result.top_logprobs.size(), std::min<size_t>(6, kept.size()));
    for (const auto& [token, logprob] : result.top_logprobs) {
      EXPECT_TRUE(kept.contains(token));
      EXPECT_NEAR(logprob, std::log(p[token] / total), 1e-6);
    }
  }
}

TEST(DrawTokenTest, ASupportOfAllTokensIsEmpty) {
  const std::vector<float> logits = SomeLogits(40, 4);
  for (const int top_k : {0, 40, 99}) {
    const DrawConfig config{
        .top_k = top_k, .truncated_logprobs = true, .support = true};
    const DrawResult result = Draw(logits, config, 0.4F);
    EXPECT_TRUE(result.support.empty());
    EXPECT_NEAR(result.logprob, std::log(Softmax(logits, 1)[result.token]),
                1e-6);
  }
}

TEST(DrawTokenTest, MinPGrowsPastItsFirstCandidatesOnFlatLogits) {
  std::vector<float> flat(5000, 0.5F);
  std::fill(flat.begin() + 3000, flat.end(), -1);
  EXPECT_EQ(Draw(flat, {.min_p = 0.5}, 0).token, 0);
  EXPECT_EQ(Draw(flat, {.min_p = 0.5}, kJustBelowOne).token, 2999);
  EXPECT_EQ(Draw(flat, {.temperature = 0, .min_p = 0.5}, 0.9F).token, 0);
}

TEST(DrawTokenTest, TopPGrowsPastItsFirstCandidatesOnFlatLogits) {
  const std::vector<float> flat(5000, 0.5F);
  const DrawConfig config{.top_p = 0.5};
  // Equal logits are ordered by id, so the last kept token is the 2500th.
  EXPECT_EQ(Draw(flat, config, 0).token, 0);
  EXPECT_NEAR(Draw(flat, config, kJustBelowOne).token, 2499, 1);
}

TEST(DrawTokenTest, EndsOfTheUniformGiveFirstAndLastPossibleToken) {
  const std::vector<float> logits = {-kInfinity, 0, 0, 0, -kInfinity};
  for (const DrawConfig& config :
       {DrawConfig{}, DrawConfig{.top_k = 4}, DrawConfig{.top_p = 0.999}}) {
    EXPECT_EQ(Draw(logits, config, 0).token, 1);
    EXPECT_EQ(Draw(logits, config, kJustBelowOne).token, 3);
  }
}

TEST(DrawTokenTest, GreedyTakesTheFirstOfEqualLogitsOfAllBlocks) {
  std::vector<float> logits(1500, -1);
  logits[700] = logits[1400] = 2;
  EXPECT_EQ(Draw(logits, {.temperature = 0}, 0).token, 700);
  std::fill_n(logits.begin(), 600, -kInfinity);
  EXPECT_EQ(Draw(logits, {.temperature = 0}, 0).token, 700);
}

TEST(DrawTokenTest, TheLowestFiniteLogitIsDrawn) {
  const std::vector<float> logits = {-kInfinity,
                                     std::numeric_limits<float>::lowest()};
  EXPECT_EQ(Draw(logits, {}, 0.5F).token, 1);
}

TEST(DrawTokenTest, NeverDrawsMinusInfinity) {
  std::vector<float> logits(3000, -kInfinity);
  logits[17] = -3;
  logits[2048] = -4;
  for (const DrawConfig& config :
       {DrawConfig{}, DrawConfig{.top_k = 50}, DrawConfig{.top_p = 0.9999},
        DrawConfig{.temperature = 1e3}}) {
    EXPECT_THAT(Support(logits, config), ElementsAre(17, 2048));
  }
}

TEST(DrawTokenTest, TinyAndHugeTemperaturesStayFinite) {
  const std::vector<float> logits = {-50, 80, 79.5, 0};
  EXPECT_THAT(Support(logits, {.temperature = 1e-3}), ElementsAre(1));
  EXPECT_EQ(Draw(logits, {.temperature = 1e-3}, 0.5F).logprob, 0);
  EXPECT_THAT(Support(logits, {.temperature = 1e3}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Support(logits, {.temperature = 1e-300}), ElementsAre(1));
}

TEST(DrawTokenTest, ReturnsTopLogprobsLikeliestFirst) {
  const std::vector<float> logits = {0, 2, 1, 2};
  const std::vector<double> p = Softmax(logits, 0.5);
  const DrawResult result =
      Draw(logits, {.temperature = 0.5, .top_k = 1, .top_logprobs = 3}, 0);
  ASSERT_EQ(result.top_logprobs.size(), 3U);
  const int32_t expected[] = {1, 3, 2};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(result.top_logprobs[i].first, expected[i]);
    EXPECT_NEAR(result.top_logprobs[i].second, std::log(p[expected[i]]), 1e-6);
  }
  EXPECT_EQ(Draw(logits, {.top_logprobs = 20}, 0).top_logprobs.size(), 4U);
}

TEST(DrawTokenTest, OneTokenVocabularyGivesItWithCertainty) {
  const std::vector<float> logits = {-7};
  const DrawResult result = Draw(logits, {}, kJustBelowOne);
  EXPECT_EQ(result.token, 0);
  EXPECT_EQ(result.logprob, 0);
}

// Returns the arguments of DrawFromList for the likeliest `size` tokens.
struct LikeliestList {
  LikeliestList(const std::vector<float>& row, double temperature,
                size_t size) {
    ids.resize(row.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::ranges::stable_sort(
        ids, [&](int32_t a, int32_t b) { return row[a] > row[b]; });
    const double max = row[ids.front()];
    double total = 0;
    for (const float x : row) total += std::exp((x - max) / temperature);
    log_total = std::log(total);
    ids.resize(size);
    std::ranges::sort(ids);
    for (const int32_t id : ids) logits.push_back(row[id]);
  }
  TokenList list() const {
    return {.tokens = ids, .logits = logits, .log_total = log_total};
  }

  std::vector<int32_t> ids;
  std::vector<float> logits;
  double log_total = 0;
};

// Rows have many equal logits, and some have few tokens that may be drawn.
TEST(DrawFromListTest, HasTheTokensAndSupportsOfDrawToken) {
  const std::vector<DrawConfig> configs = {
      {.temperature = 0.8, .top_k = 40, .top_p = 0.9, .support = true},
      {.top_k = 9,
       .min_p = 0.01,
       .top_logprobs = 20,
       .truncated_logprobs = true},
      {.top_k = 100, .top_p = 0.7, .min_p = 0.1, .support = true}};
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 3);
  for (int time = 0; time < 200; ++time) {
    std::vector<float> row(700);
    for (float& x : row) x = std::round(4 * normal(random)) / 4;
    if (time % 4 == 0) {
      std::fill(row.begin() + 30, row.end(),
                -std::numeric_limits<float>::infinity());
    }
    for (const DrawConfig& config : configs) {
      const LikeliestList part(row, config.temperature,
                               ListSize(config, row.size()));
      const float uniform = CounterUniform(8, 1, time);
      const DrawResult expected = DrawToken(row, config, uniform).value();
      const DrawResult result =
          DrawFromList(part.list(), config, uniform, {.token = 4});
      EXPECT_EQ(result.token, expected.token);
      EXPECT_EQ(result.support, expected.support);
      EXPECT_NEAR(result.logprob, expected.logprob,
                  Tolerance(kEpsilonF32, 1, 10));
      ASSERT_EQ(result.top_logprobs.size(), expected.top_logprobs.size());
      for (size_t i = 0; i < result.top_logprobs.size(); ++i) {
        EXPECT_EQ(result.top_logprobs[i], expected.top_logprobs[i]);
      }
    }
  }
}

// A draw from the whole row may be no token of the list.
TEST(DrawFromListTest, KeepsADrawThatNeedsNoList) {
  const std::vector<float> row = {1, 4, 2, 3, 0};
  const LikeliestList part(row, 1, 2);
  const DrawConfig config{.top_logprobs = 2};
  EXPECT_EQ(ListSize(config, row.size()), 2);
  const DrawResult outside =
      DrawFromList(part.list(), config, 0, {.token = 2, .logprob = -7});
  EXPECT_EQ(outside.token, 2);
  EXPECT_EQ(outside.logprob, -7);
  const DrawResult inside =
      DrawFromList(part.list(), config, 0, {.token = 3, .logprob = -7});
  EXPECT_EQ(inside.token, 3);
  for (const DrawResult& result : {outside, inside}) {
    ASSERT_EQ(result.top_logprobs.size(), 2);
    EXPECT_EQ(result.top_logprobs[0].first, 1);
    EXPECT_EQ(result.top_logprobs[1].first, 3);
  }
  EXPECT_EQ(inside.logprob, inside.top_logprobs[1].second);
}

TEST(ListSizeTest, IsWhatTheListsAndTheKeptTokensNeed) {
  const auto size = [](const DrawConfig& config) {
    return ListSize(config, 50);
  };
  EXPECT_EQ(size({.top_k = 7, .top_p = 0.5}), 0);
  EXPECT_EQ(size({.support = true}), 0);
  EXPECT_EQ(size({.top_logprobs = 5}), 5);
  EXPECT_EQ(size({.top_k = 7, .top_logprobs = 5, .support = true}), 7);
  EXPECT_EQ(size({.top_k = 7, .top_logprobs = 9, .support = true}), 9);
  EXPECT_EQ(size({.top_k = 70, .truncated_logprobs = true}), 50);
  EXPECT_EQ(size({.top_p = 0.5, .truncated_logprobs = true}), 50);
  EXPECT_EQ(size({.temperature = 0, .top_p = 0.5, .support = true}), 0);
}

}  // namespace
}  // namespace weft::sampling
