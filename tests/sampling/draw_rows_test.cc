// Tests draws from the rows of a batch.
#include "src/sampling/draw_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/support/tolerance.h"

namespace weft::sampling {
namespace {

constexpr int64_t kVocab = 700;

// Returns rules of every kind: greedy, plain, filtered, and with the top
// log-probabilities.
std::vector<DrawRule> SomeRules() {
  std::vector<DrawRule> rules;
  for (const DrawConfig& config :
       {DrawConfig{.temperature = 0}, DrawConfig{}, DrawConfig{.top_k = 5},
        DrawConfig{.temperature = 0.7, .top_p = 0.5},
        DrawConfig{.temperature = 2, .top_logprobs = 3},
        DrawConfig{.top_p = 0.9, .min_p = 0.1},
        DrawConfig{.temperature = 0.8,
        .top_k = 40,
        .top_p = 0.9,
        .top_logprobs = 60,
        .support = true},
        DrawConfig{.top_k = 9,
        .min_p = 0.01,
        .top_logprobs = 20,
        .truncated_logprobs = true,
        .support = true},
        DrawConfig{.temperature = 0,
        .top_k = 3,
        .top_logprobs = 2,
        .truncated_logprobs = true,
        .support = true},
        DrawConfig{.temperature = 1.5, .top_k = kVocab, .support = true},
        DrawConfig{
            .top_p = 0.8, .truncated_logprobs = true, .support = true}}) {
    const auto row = static_cast<uint32_t>(rules.size());
    rules.push_back({.config = config,
                     .seed = uint64_t{9} << 33,
                     .sample_index = row + 1,
                     .position = 4 * row,
                     .row = static_cast<int32_t>(row)});
  }
  return rules;
}

at::Tensor SomeLogits() {
  at::manual_seed(4);
  return at::randn({static_cast<int64_t>(SomeRules().size()), kVocab}) * 3;
}

TEST(DrawRowsTest, EveryRowIsDrawnByItsOwnRule) {
  const std::vector<DrawRule> rules = SomeRules();
  const at::Tensor logits = SomeLogits();
  const auto drawn = DrawRows(logits, rules);
  ASSERT_EQ(drawn.size(), rules.size());
  for (size_t r = 0; r < rules.size(); ++r) {
    const DrawResult expected =
        DrawToken({logits.const_data_ptr<float>() + r * kVocab, kVocab},
                  rules[r].config,
                  CounterUniform(rules[r].seed, rules[r].sample_index,
                                 rules[r].position))
            .value();
    ASSERT_TRUE(drawn[r].has_value());
    EXPECT_EQ(drawn[r]->token, expected.token);
    EXPECT_EQ(drawn[r]->logprob, expected.logprob);
    EXPECT_EQ(drawn[r]->top_logprobs, expected.top_logprobs);
    EXPECT_EQ(drawn[r]->support, expected.support);
  }
  EXPECT_GT(drawn.back()->support.size(), 1);
}

// Several rules draw from one row, as for several samples of one prompt.
TEST(DrawRowsTest, ManyRulesDrawFromOneRow) {
  const at::Tensor logits = SomeLogits();
  std::vector<DrawRule> rules;
  for (const int32_t row : {3, 3, 0, 3}) {
    rules.push_back({.seed = 7,
                     .sample_index = static_cast<uint32_t>(rules.size()),
                     .row = row});
  }
  const auto drawn = DrawRows(logits, rules);
  for (size_t i = 0; i < rules.size(); ++i) {
    DrawRule alone = rules[i];
    alone.row = 0;
    const auto expected =
        DrawRows(logits.narrow(0, rules[i].row, 1), {alone}).front();
    EXPECT_EQ(drawn[i].value().token, expected.value().token) << i;
    EXPECT_EQ(drawn[i]->logprob, expected->logprob) << i;
  }
}

TEST(DrawRowsTest, ARowThatIsNoDistributionDrawsNothing) {
  at::Tensor logits = SomeLogits();
  logits[1][5] = std::nan("");
  const auto drawn = DrawRows(logits, SomeRules());
  for (size_t r = 0; r < drawn.size(); ++r) {
    EXPECT_EQ(drawn[r].has_value(), r != 1) << r;
  }
}

TEST(DrawRowsTest, RefusesWhatDoesNotFit) {
  const std::vector<DrawRule> rules = SomeRules();
  const at::Tensor logits = SomeLogits();
  EXPECT_THROW((void)DrawRows(logits.narrow(0, 1, 2), rules), c10::Error);
  EXPECT_THROW((void)DrawRows(logits, {{.row = -1}}), c10::Error);
  EXPECT_THROW((void)DrawRows(logits.to(at::kDouble), rules), c10::Error);
  EXPECT_THROW((void)DrawRows(logits.narrow(1, 0, 9), rules), c10::Error);
  EXPECT_TRUE(DrawRows(logits.narrow(0, 0, 0), {}).empty());
}

// In these draws, the uniform number is far enough from every border between
// tokens that rounding does not change the token.
TEST(CudaDrawRowsTest, DrawsAsTheCpuDoes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  std::vector<DrawRule> rules = SomeRules();
  rules[2].config.temperature = 1e-60;  // This temperature is 0 in f32, where 0
                                        // means greedy.
  // Adds a second rule to rows 4 and 2. The first rule of row 4 asks for top
  // log-probabilities, and the first rule of row 2 does not.
  for (const int32_t row : {4, 2}) {
    rules.push_back(
        {.config = {.top_logprobs = 5}, .sample_index = 9, .row = row});
  }
  at::Tensor logits = SomeLogits();
  logits[1][5] = std::nan("");
  const auto expected = DrawRows(logits, rules);
  const auto drawn = DrawRows(logits.to(at::kCUDA), rules);
  ASSERT_EQ(drawn.size(), expected.size());
  for (size_t r = 0; r < rules.size(); ++r) {
    ASSERT_EQ(drawn[r].has_value(), expected[r].has_value()) << r;
    if (!drawn[r].has_value()) continue;
    EXPECT_EQ(drawn[r]->token, expected[r]->token) << r;
    EXPECT_NEAR(drawn[r]->logprob, expected[r]->logprob,
                Tolerance(kEpsilonF32, 1, 10));
    EXPECT_EQ(drawn[r]->support, expected[r]->support) << r;
    ASSERT_EQ(drawn[r]->top_logprobs.size(), expected[r]->top_logprobs.size());
    for (size_t i = 0; i < drawn[r]->top_logprobs.size(); ++i) {
      const auto& [token, logprob] = drawn[r]->top_logprobs[i];
      EXPECT_EQ(token, expected[r]->top_logprobs[i].first) << r;
      EXPECT_NEAR(logprob, expected[r]->top_logprobs[i].second,
                  Tolerance(kEpsilonF32, 30, 10));
      if (token == drawn[r]->token) {
        EXPECT_EQ(logprob, drawn[r]->logprob);
      }
    }
  }
}

// A prompt may have more samples than the device draws at a time.
TEST(CudaDrawRowsTest, DrawsForManyRules) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  std::vector<DrawRule> rules;
  for (uint32_t i = 0; i < 600; ++i) {
    rules.push_back({.config = SomeRules()[i % 4].config,
                     .seed = 3,
                     .sample_index = i,
                     .row = static_cast<int32_t>(i % 2)});
  }
  const at::Tensor logits = SomeLogits().narrow(1, 0, 40).contiguous();
  const auto expected = DrawRows(logits, rules);
  const auto drawn = DrawRows(logits.to(at::kCUDA), rules);
  ASSERT_EQ(drawn.size(), rules.size());
  for (size_t i = 0; i < rules.size(); ++i) {
    EXPECT_EQ(drawn[i].value().token, expected[i].value().token) << i;
  }
}

}  // namespace
}  // namespace weft::sampling
