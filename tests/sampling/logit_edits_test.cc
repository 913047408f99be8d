// Compares changes of logits with their formula in f64.
#include "src/sampling/logit_edits.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/tolerance.h"

namespace weft::sampling {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kEditVocab = 300;

at::Tensor FourRows() {
  at::manual_seed(6);
  return at::randn({4, kEditVocab}) * 4;
}

// Rows 2 and 0 have edits, rows 0 and 3 have banned tokens, row 1 has none.
std::vector<RowEdits> SomeEdits(at::Device device) {
  std::vector<RowEdits> rows = {{.row = 2}, {.row = 0}, {.row = 3}};
  for (int32_t i = 0; i < kEditVocab; i += 7) {
    const auto x = static_cast<float>(i % 5);
    rows[0].edits.push_back({.token = i, .bias = x - 2, .repetition = 1.3F});
    rows[1].edits.push_back(
        {.token = i, .repetition = 0.5F + x, .penalty = 0.7F * x});
  }
  rows[1].banned_V = BannedTokens({}, {0, 299}, kEditVocab, device);
  rows[2].banned_V = BannedTokens({5, 6, 7}, {6}, kEditVocab, device);
  return rows;
}

std::vector<std::vector<double>> Expected(const at::Tensor& logits) {
  std::vector<std::vector<double>> rows(4);
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t i = 0; i < kEditVocab; ++i) {
      rows[r].push_back(logits[r][i].item<float>());
    }
  }
  constexpr double kOut = -std::numeric_limits<double>::infinity();
  for (const RowEdits& row : SomeEdits(at::kCPU)) {
    for (const LogitEdit& edit : row.edits) {
      double& x = rows[row.row][edit.token];
      x += edit.bias;
      x = (x > 0 ? x / edit.repetition : x * edit.repetition) - edit.penalty;
    }
  }
  rows[0][0] = rows[0][299] = kOut;
  for (int32_t i = 0; i < kEditVocab; ++i) {
    if (i != 5 && i != 7) rows[3][i] = kOut;
  }
  return rows;
}

void ExpectEdited(at::Device device) {
  const at::Tensor logits = FourRows();
  const at::Tensor edited = logits.clone().to(device);
  EditRows(edited, SomeEdits(device));
  const at::Tensor actual = edited.cpu();
  const auto expected = Expected(logits);
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t i = 0; i < kEditVocab; ++i) {
      const double value = expected[r][i];
      const auto own = actual[r][i].item<float>();
      if (std::isinf(value)) {
        EXPECT_EQ(own, value) << r << " " << i;
      } else {
        EXPECT_NEAR(own, value, Tolerance(kEpsilonF32, 1, 30)) << r << " " << i;
      }
    }
  }
  EXPECT_TRUE(at::equal(actual[1], logits[1]));
}

TEST(EditRowsTest, FollowsTheFormulaAndLeavesOtherLogits) {
  ExpectEdited(at::kCPU);
}

TEST(CudaEditRowsTest, FollowsTheFormulaAndLeavesOtherLogits) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  ExpectEdited(at::kCUDA);
}

// A row that was no distribution must not become one.
TEST(EditRowsTest, KeepsWhatIsNotFinite) {
  at::Tensor logits = FourRows();
  logits[2][7] = std::nan("");
  EditRows(logits, SomeEdits(at::kCPU));
  EXPECT_TRUE(std::isnan(logits[2][7].item<float>()));
}

TEST(EditRowsTest, RefusesWhatDoesNotFit) {
  EXPECT_THROW(EditRows(FourRows(), {{.row = 4}}), c10::Error);
  EXPECT_THROW(EditRows(FourRows(), {{.row = -1}}), c10::Error);
  EXPECT_THROW(EditRows(FourRows().to(at::kDouble), {}), c10::Error);
  EXPECT_THROW(EditRows(FourRows().narrow(1, 0, 9), {}), c10::Error);
}

TEST(BannedTokensTest, AreNoneWithoutLists) {
  EXPECT_FALSE(BannedTokens({}, {}, kEditVocab, at::kCPU).defined());
}

TEST(SequenceEditsTest, ARequestWithoutOptionsHasNone) {
  SequenceEdits edits({}, {1, 2, 3});
  edits.Push(5);
  EXPECT_THAT(edits.edits(), IsEmpty());
  EXPECT_EQ(edits.edits().capacity(), 0);
}

TEST(SequenceEditsTest, RepetitionCountsThePromptAndTheOtherPenaltiesDoNot) {
  SamplingConfig config;
  config.repetition_penalty = 2;
  config.presence_penalty = 0.5F;
  config.frequency_penalty = 0.25F;
  config.logit_bias = {{9, 3}, {2, -1}};
  SequenceEdits edits(config, {4, 2, 4});
  ASSERT_THAT(edits.edits(), SizeIs(3));
  for (const int32_t token : {2, 7, 2, 7, 7}) edits.Push(token);
  const auto& all = edits.edits();
  ASSERT_THAT(all, SizeIs(4));
  const LogitEdit expected[] = {
      {.token = 2, .bias = -1, .repetition = 2, .penalty = 1},
      {.token = 4, .repetition = 2},
      {.token = 7, .repetition = 2, .penalty = 1.25F},
      {.token = 9, .bias = 3}};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(all[i].token, expected[i].token);
    EXPECT_EQ(all[i].bias, expected[i].bias);
    EXPECT_EQ(all[i].repetition, expected[i].repetition);
    EXPECT_EQ(all[i].penalty, expected[i].penalty);
  }
}

TEST(SequenceEditsTest, BiasesAloneDoNotGrow) {
  SamplingConfig config;
  config.logit_bias = {{9, 3}};
  SequenceEdits edits(config, {4, 2, 4});
  edits.Push(4);
  EXPECT_THAT(edits.edits(), SizeIs(1));
}

}  // namespace
}  // namespace weft::sampling
