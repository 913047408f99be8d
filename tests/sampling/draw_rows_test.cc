// Drawing for the rows of a batch.
#include "src/sampling/draw_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/support/tolerance.h"

namespace weft::sampling {
namespace {

using ::weft::testing::kEpsilonF32;
using ::weft::testing::Tolerance;

constexpr int64_t kVocab = 700;

// Rows of every kind: greedy, plain, filtered, with a list of likeliest tokens.
std::vector<DrawRule> SomeRules() {
  std::vector<DrawRule> rules;
  for (const DrawConfig& config :
       {DrawConfig{.temperature = 0}, DrawConfig{}, DrawConfig{.top_k = 5},
        DrawConfig{.temperature = 0.7, .top_p = 0.5},
        DrawConfig{.temperature = 2, .top_logprobs = 3}}) {
    const auto row = static_cast<uint32_t>(rules.size());
    rules.push_back({.config = config,
                     .seed = uint64_t{9} << 33,
                     .sample_index = row + 1,
                     .position = 4 * row});
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
  EXPECT_THROW((void)DrawRows(logits.to(at::kDouble), rules), c10::Error);
  EXPECT_THROW((void)DrawRows(logits.narrow(1, 0, 9), rules), c10::Error);
  EXPECT_TRUE(DrawRows(logits.narrow(0, 0, 0), {}).empty());
}

// No draw of these is so near a border that rounding decides it.
TEST(CudaDrawRowsTest, DrawsAsTheCpuDoes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  std::vector<DrawRule> rules = SomeRules();
  rules[2].config.temperature = 1e-60;  // 0 in f32, where it means greedy.
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
    EXPECT_EQ(drawn[r]->top_logprobs, expected[r]->top_logprobs);
  }
}

}  // namespace
}  // namespace weft::sampling
