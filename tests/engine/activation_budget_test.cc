#include "src/engine/activation_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/status/status.h"
#include "tests/model/tiny_model.h"

namespace weft::engine {
namespace {

using ::testing::HasSubstr;

constexpr ActivationBytes kBytes = {
    .kept_layer = 100, .recomputed_layer = 10, .working = 50};

int Choose(GradientCheckpointing policy, int64_t budget) {
  return ChooseRecomputed(policy, kBytes, /*num_layers=*/4, budget).value();
}

TEST(ChooseRecomputedTest, AutoRecomputesNoMoreThanItMust) {
  // All kept: 450; each recomputed layer saves 90.
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 0), 0);
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 450), 0);
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 449), 1);
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 360), 1);
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 90), 4);
}

TEST(ChooseRecomputedTest, OffAndAllDoAsTheySay) {
  EXPECT_EQ(Choose(GradientCheckpointing::kOff, 450), 0);
  EXPECT_EQ(Choose(GradientCheckpointing::kAll, 450), 4);
}

TEST(ChooseRecomputedTest, RefusesWhatCannotFitWithBothNumbers) {
  const absl::Status all =
      ChooseRecomputed(GradientCheckpointing::kAuto, kBytes, 4, 89).status();
  EXPECT_TRUE(absl::IsResourceExhausted(all));
  EXPECT_THAT(std::string(all.message()), HasSubstr("needs 90 bytes"));
  EXPECT_THAT(std::string(all.message()), HasSubstr("there are 89"));
  const absl::Status off =
      ChooseRecomputed(GradientCheckpointing::kOff, kBytes, 4, 449).status();
  EXPECT_THAT(std::string(off.message()), HasSubstr("needs 450 bytes"));
  EXPECT_THAT(std::string(off.message()),
              HasSubstr("--gradient-checkpointing"));
}

TEST(ChooseRecomputedTest, AModelWithoutLayersFits) {
  EXPECT_EQ(
      ChooseRecomputed(GradientCheckpointing::kAuto, kBytes, 0, 50).value(), 0);
}

TEST(ActivationsOfTest, GrowsWithRowsAndCountsTheHeadByItsChunk) {
  const model::ModelConfig config = weft::testing::TinyConfig();
  const auto bytes = [&](int64_t rows, int64_t scored, int64_t chunk) {
    return ActivationsOf(config, 4, 8,
                         {.rows = rows, .scored = scored, .chunk = chunk});
  };
  EXPECT_EQ(bytes(20, 0, 8).kept_layer, 2 * bytes(10, 0, 8).kept_layer);
  EXPECT_LT(bytes(10, 0, 8).recomputed_layer, bytes(10, 0, 8).kept_layer / 8);
  // A head that is larger than a layer, in chunks and whole.
  EXPECT_LT(bytes(1, 1000, 10).working, bytes(1, 1000, 1000).working);
}

TEST(ActivationsOfTest, CountsTheSoftmaxAndThePartialSumsOfBf16) {
  const model::ModelConfig config = weft::testing::TinyConfig();
  const auto working = [&](int64_t element_bytes, const BatchRows& batch) {
    return ActivationsOf(config, element_bytes, /*max_rank=*/8, batch).working;
  };
  // Where the head is the larger part: logits, and in bf16 a copy of them.
  const BatchRows head = {.rows = 1, .scored = 4096, .chunk = 4096};
  EXPECT_EQ(working(2, head) - working(4, head), 4096 * config.vocab * 2);
  // Half of f32's, and a partial sum of a gradient per 1024 rows.
  const BatchRows layer = {.rows = 2049};
  const ActivationBytes f32 = ActivationsOf(config, 4, 8, layer);
  const int64_t log_sum_exp = 2049 * config.num_heads * 4;
  EXPECT_EQ(
      working(2, layer),
      (f32.working - log_sum_exp) / 2 + log_sum_exp +
          3 * 8 * 4 *
              std::max<int64_t>(2 * config.ffn,
                                (config.num_heads + 2 * config.num_kv_heads) *
                                    config.head_dim));
}

TEST(ActivationsOfTest, CountsOutputNormsAndTheScoresOfMaskedAttention) {
  model::ModelConfig config = weft::testing::TinyConfig();
  const auto bytes = [&](int64_t rows) {
    return ActivationsOf(config, 4, 8, {.rows = rows});
  };
  const ActivationBytes plain = bytes(1000);
  config.attention[1].rule.window = 1000;  // Longer than any path can be.
  EXPECT_EQ(bytes(1000).working, plain.working);
  config.attention[1].rule.window = 100;
  // Four score matrices of a block; keys, values and their gradients.
  const auto scores = [&](int64_t keys) {
    return 4 * (4 * config.num_heads * 256 * keys +
                (2 * 1000 + 4 * keys) * config.num_kv_heads * config.head_dim);
  };
  EXPECT_EQ(bytes(1000).working, plain.working + scores(100 + 256));
  config.attention[0].rule.softcap = 50;
  EXPECT_EQ(bytes(1000).working, plain.working + scores(1000));
  config.output_norms = true;
  EXPECT_EQ(bytes(1000).kept_layer,
            plain.kept_layer + 1000 * 2 * config.hidden * 4);
}

TEST(DefaultHostBudgetTest, IsAPartOfThisMachine) {
  EXPECT_GT(DefaultHostBudget(), int64_t{16} << 20);
}

}  // namespace
}  // namespace weft::engine
