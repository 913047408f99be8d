#include "src/engine/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/engine/kv_pool.h"
#include "src/group/rank.h"
#include "tests/model/tiny_model.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

using ::weft::testing::TinyDecoder;

constexpr int64_t kGiB = int64_t{1} << 30;

class MemoryPlanTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  MemoryPlanTest() : decoder_(TinyDecoder(GetParam(), /*seed=*/3)) {
    options_.max_context_tokens = 64;
    options_.max_rank = 8;
  }

  const model::Decoder decoder_;
  EngineOptions options_;
};

TEST_P(MemoryPlanTest, CountsWhatTheLargestAdapterHolds) {
  LoraConfig config{.rank = 8};
  config.target_modules.assign(kAllTargetModules.begin(),
                               kAllTargetModules.end());
  const lora::Adapter adapter(config, decoder_.config().shape(),
                              decoder_.dtype(), at::kCPU);
  EXPECT_EQ(LargestAdapterBytes(decoder_, 8), adapter.resident_bytes());
}

TEST_P(MemoryPlanTest, FillsInWhatIsNotSet) {
  const auto split = PlanMemory(decoder_, 8 * kGiB, &options_);
  ASSERT_TRUE(split.ok()) << split.status();
  // A tiny model needs no more than this.
  EXPECT_EQ(options_.max_resident_adapters, kDefaultResidentAdapters);
  EXPECT_EQ(options_.kv_cache_bytes, options_.max_decode_sequences *
                                         (64 / kPageTokens) *
                                         group::PageBytes(decoder_, 16));
  EXPECT_EQ(options_.memory_budget_bytes, split->activations);
  EXPECT_GT(options_.memory_budget_bytes, 6 * kGiB);
  EXPECT_EQ(options_.max_batch_tokens, 16384);
}

TEST_P(MemoryPlanTest, KeepsWhatIsSet) {
  options_.max_resident_adapters = 3;
  options_.kv_cache_bytes = 1 << 20;
  options_.memory_budget_bytes = 1 << 30;
  options_.max_batch_tokens = 100;
  ASSERT_TRUE(PlanMemory(decoder_, 8 * kGiB, &options_).ok());
  EXPECT_EQ(options_.max_resident_adapters, 3);
  EXPECT_EQ(options_.kv_cache_bytes, 1 << 20);
  EXPECT_EQ(options_.memory_budget_bytes, 1 << 30);
  EXPECT_EQ(options_.max_batch_tokens, 100);
}

TEST_P(MemoryPlanTest, NeverPlansForMoreAdaptersThanMayExist) {
  options_.max_adapters = 5;
  ASSERT_TRUE(PlanMemory(decoder_, 8 * kGiB, &options_).ok());
  EXPECT_EQ(options_.max_resident_adapters, 5);
}

TEST_P(MemoryPlanTest, AMicroBatchIsAsLongAsTheBudgetTakes) {
  options_.memory_budget_bytes = LeastActivationBytes(decoder_, options_, 4096);
  ASSERT_TRUE(PlanMemory(decoder_, 8 * kGiB, &options_).ok());
  EXPECT_EQ(options_.max_batch_tokens, 4096);
  options_.max_batch_tokens = 0;
  --options_.memory_budget_bytes;
  ASSERT_TRUE(PlanMemory(decoder_, 8 * kGiB, &options_).ok());
  EXPECT_EQ(options_.max_batch_tokens, 2048);
}

TEST_P(MemoryPlanTest, AMicroBatchThatCannotFitEndsTheStart) {
  options_.max_batch_tokens = int64_t{1} << 30;
  EXPECT_THAT(
      PlanMemory(decoder_, 8 * kGiB, &options_).status(),
      IsStatus(absl::StatusCode::kResourceExhausted, "--max-batch-tokens"));
}

TEST_P(MemoryPlanTest, WithoutRecomputedLayersTheLeastIsMore) {
  const int64_t recomputed = LeastActivationBytes(decoder_, options_, 512);
  options_.gradient_checkpointing = GradientCheckpointing::kOff;
  EXPECT_GT(LeastActivationBytes(decoder_, options_, 512), recomputed);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, MemoryPlanTest,
                         ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace weft::engine
