// Compares changes of logits with their formula in f64.
#include "src/sampling/logit_edits.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "tests/support/tolerance.h"

namespace weft::sampling {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

// Not a multiple of 32, so that the last word of banned tokens has a rest.
constexpr int64_t kEditVocab = 300;
// A product with the first is rounded, and so is its difference to the others.
constexpr float kRepetition = 1.7F;
constexpr float kPresence = 0.3F;
constexpr float kFrequency = 0.23F;

at::Tensor FourRows() {
  at::manual_seed(6);
  return at::randn({4, kEditVocab}) * 4;
}

SamplingConfig PenaltyConfig() {
  SamplingConfig config;
  config.repetition_penalty = kRepetition;
  config.presence_penalty = kPresence;
  config.frequency_penalty = kFrequency;
  config.logit_bias = {{9, 3}, {2, -1}};
  return config;
}

// Rows 2 and 0 have edits, rows 0 and 3 have banned tokens, row 1 has none. Row
// 0 has fewer than min_tokens tokens.
class SomeEdits {
 public:
  explicit SomeEdits(at::Device device) {
    SamplingConfig first = PenaltyConfig();
    first.min_tokens = 4;
    SamplingConfig second;
    second.frequency_penalty = 0.75F;
    SamplingConfig third;
    third.allowed_token_ids = {5, 6, 299};
    for (const SamplingConfig& config : {first, second, third}) {
      shared_.push_back(std::make_unique<SharedEdits>(
          config, std::vector<int32_t>{4, 2, 4, 60}, std::vector<int32_t>{0, 6},
          kEditVocab, device));
      edits_.emplace_back(shared_.back().get());
    }
  }
  // Sequences 0 and 1 draw a token.
  void Push(int32_t token) {
    edits_[0].Push(token);
    edits_[1].Push(token);
    ++counts_[token];
  }
  std::vector<RowEdits> Rows() {
    return {{.row = 2, .edits = &edits_[1]},
            {.row = 0, .edits = &edits_[0], .early = true},
            {.row = 3, .edits = &edits_[2]}};
  }

  // Returns the formula's value of a logit.
  double Expected(int64_t row, int32_t token, double x) const {
    constexpr double kOut = -std::numeric_limits<double>::infinity();
    const auto found = counts_.find(token);
    const int count = found == counts_.end() ? 0 : found->second;
    if (row == 3) return token == 5 || token == 6 || token == 299 ? x : kOut;
    if (row == 2) return x - 0.75 * count;
    if (row == 1) return x;
    if (token == 0 || token == 6) return kOut;
    if (token == 9) x += 3;
    if (token == 2) x -= 1;
    const bool in_prompt = token == 4 || token == 2 || token == 60;
    if (in_prompt || count > 0) x = x > 0 ? x / kRepetition : x * kRepetition;
    return count > 0 ? x - kPresence - kFrequency * count : x;
  }

 private:
  std::vector<std::unique_ptr<SharedEdits>> shared_;
  std::vector<SequenceEdits> edits_;
  std::map<int32_t, int> counts_;
};

void ExpectEdited(SomeEdits& edits, at::Device device) {
  const at::Tensor logits = FourRows();
  const at::Tensor edited = logits.clone().to(device);
  EditRows(edited, edits.Rows());
  const at::Tensor actual = edited.cpu();
  for (int64_t r = 0; r < 4; ++r) {
    for (int32_t i = 0; i < kEditVocab; ++i) {
      const double value = edits.Expected(r, i, logits[r][i].item<float>());
      const auto own = actual[r][i].item<float>();
      if (std::isinf(value)) {
        EXPECT_EQ(own, value) << r << " " << i;
      } else {
        EXPECT_NEAR(own, value, Tolerance(kEpsilonF32, 1, 60)) << r << " " << i;
      }
    }
  }
}

// Draws tokens one by one, of the prompt and others, again and again, and more
// than the first list on a device holds. After some of them nothing is edited,
// as in a sample that waits for pages.
void ExpectEditedAsTheSampleGrows(at::Device device) {
  SomeEdits edits(device);
  ExpectEdited(edits, device);
  // In another order than that of the shared edits.
  for (const int32_t token : {60, 9, 4}) edits.Push(token);
  for (int draw = 0; draw < 100; ++draw) {
    edits.Push(draw % 3 == 0 ? draw % 4 : 10 + draw * 29 % 200);
    if (draw % 5 != 0 || draw > 90) continue;
    SCOPED_TRACE(draw);
    ExpectEdited(edits, device);
  }
  ExpectEdited(edits, device);
}

TEST(EditRowsTest, FollowsTheFormulaAndLeavesOtherLogits) {
  ExpectEditedAsTheSampleGrows(at::kCPU);
}

TEST(CudaEditRowsTest, FollowsTheFormulaAndLeavesOtherLogits) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  ExpectEditedAsTheSampleGrows(at::kCUDA);
}

TEST(CudaEditRowsTest, HasTheBitsOfTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  SomeEdits on_host(at::kCPU), on_device(at::kCUDA);
  const at::Tensor expected = FourRows();
  const at::Tensor edited = FourRows().to(at::kCUDA);
  for (int draw = 0; draw < 9; ++draw) {
    on_host.Push(draw * 3);
    on_device.Push(draw * 3);
    EditRows(expected, on_host.Rows());
    EditRows(edited, on_device.Rows());
    EXPECT_TRUE(at::equal(edited.cpu(), expected)) << draw;
  }
}

// A row that was no distribution must not become one.
TEST(EditRowsTest, KeepsWhatIsNotFinite) {
  at::Tensor logits = FourRows();
  logits[2][7] = std::nan("");
  SomeEdits edits(at::kCPU);
  edits.Push(7);
  EditRows(logits, edits.Rows());
  EXPECT_TRUE(std::isnan(logits[2][7].item<float>()));
}

TEST(EditRowsTest, RefusesWhatDoesNotFit) {
  const SharedEdits shared;
  SequenceEdits edits(&shared);
  for (const int64_t row : {4, -1}) {
    EXPECT_THROW(EditRows(FourRows(), {{.row = row, .edits = &edits}}),
                 c10::Error);
  }
  EXPECT_THROW(EditRows(FourRows().to(at::kDouble), {}), c10::Error);
  EXPECT_THROW(EditRows(FourRows().narrow(1, 0, 9), {}), c10::Error);
}

TEST(SequenceEditsTest, ARequestWithoutOptionsHasNone) {
  const SharedEdits shared({}, {1, 2, 3}, {4}, kEditVocab, at::kCPU);
  SequenceEdits edits(&shared);
  edits.Push(5);
  EXPECT_TRUE(edits.IsEmpty(/*early=*/false));
  EXPECT_TRUE(edits.IsEmpty(/*early=*/true));
  EXPECT_EQ(shared.edits().capacity() + edits.own().capacity(), 0);
}

TEST(SequenceEditsTest, StopsAreBannedOnlyFromEarlyTokens) {
  SamplingConfig config;
  config.min_tokens = 2;
  const SharedEdits shared(config, {1}, {4}, kEditVocab, at::kCPU);
  const SequenceEdits edits(&shared);
  EXPECT_TRUE(edits.IsEmpty(/*early=*/false));
  EXPECT_FALSE(edits.IsEmpty(/*early=*/true));
}

TEST(SequenceEditsTest, RepetitionCountsThePromptAndTheOtherPenaltiesDoNot) {
  const SharedEdits shared(PenaltyConfig(), {4, 2, 4}, {}, kEditVocab,
                           at::kCPU);
  const auto expect = [](const std::vector<LogitEdit>& actual,
                         const std::vector<LogitEdit>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_EQ(actual[i].token, expected[i].token);
      EXPECT_EQ(actual[i].bias, expected[i].bias);
      EXPECT_EQ(actual[i].repetition, expected[i].repetition);
      EXPECT_EQ(actual[i].penalty, expected[i].penalty);
    }
  };
  expect(shared.edits(), {{.token = 2, .bias = -1, .repetition = kRepetition},
                          {.token = 4, .repetition = kRepetition},
                          {.token = 9, .bias = 3}});
  SequenceEdits edits(&shared);
  for (const int32_t token : {2, 7, 2, 7, 7, 9}) edits.Push(token);
  // The shared edits have the repetition penalty of token 2, not of token 9.
  expect(edits.own(), {{.token = 2, .penalty = kPresence + kFrequency * 2},
                       {.token = 7,
                        .repetition = kRepetition,
                        .penalty = kPresence + kFrequency * 3},
                       {.token = 9,
                        .repetition = kRepetition,
                        .penalty = kPresence + kFrequency}});
}

TEST(SequenceEditsTest, BiasesAloneDoNotGrow) {
  SamplingConfig config;
  config.logit_bias = {{9, 3}};
  const SharedEdits shared(config, {4, 2, 4}, {}, kEditVocab, at::kCPU);
  SequenceEdits edits(&shared);
  edits.Push(4);
  EXPECT_THAT(shared.edits(), SizeIs(1));
  EXPECT_THAT(edits.own(), IsEmpty());
}

// An iteration uploads what the sequence has drawn since the last one.
TEST(SequenceEditsTest, OnlyNewTokensAreStaleOnADevice) {
  const SharedEdits shared(PenaltyConfig(), {4}, {}, kEditVocab, at::kCPU);
  SequenceEdits edits(&shared);
  const auto stale = [&] { return edits.UpdateOn(at::kCPU).stale_places; };
  EXPECT_THAT(stale(), IsEmpty());
  int32_t num_stale = 0;
  for (int32_t token = 0; token < 250; ++token) {
    edits.Push(token);
    num_stale += static_cast<int32_t>(stale().size());
  }
  // A new list has 64 entries or twice as many as it needs.
  EXPECT_EQ(num_stale, 250 + (65 - 1) + (131 - 1));
  edits.Push(3);
  edits.Push(7);
  edits.Push(3);
  EXPECT_THAT(stale(), ::testing::ElementsAre(3, 7));
  EXPECT_THAT(stale(), IsEmpty());
}

}  // namespace
}  // namespace weft::sampling
