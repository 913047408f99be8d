#include "src/model_config/model_shard.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "src/model_config/weight_list.h"
#include "tests/support/status_matchers.h"

namespace weft::model_config {
namespace {

using parallel::Range;
using parallel::Shard;

ModelConfig Heads(int num_heads, int num_kv_heads) {
  return {.num_layers = 2,
          .hidden = 60,
          .ffn = 103,
          .vocab = 211,
          .num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_dim = 4,
          .tied_embeddings = true};
}

// Returns how many of the rank's query heads read each of the rank's key/value
// heads. Query head h of the model reads key/value head h / (query heads per
// key/value head).
std::vector<int64_t> Served(const ModelConfig& config, const ModelShard& part) {
  std::vector<int64_t> served(part.kv_heads.size(), 0);
  const int64_t group = config.num_heads / config.num_kv_heads;
  for (int64_t head = part.heads.begin; head < part.heads.end; ++head) {
    served.at(head / group - part.kv_heads.begin) += 1;
  }
  return served;
}

TEST(ModelShardTest, EveryRankHasTheKeyValueHeadsOfItsQueryHeads) {
  for (const auto& [heads, kv_heads, sizes] :
       std::vector<std::tuple<int, int, std::vector<int>>>{
           {9, 3, {1, 2, 3, 4, 5, 6, 7, 8, 9}},
           {14, 2, {1, 2, 3, 4, 5, 7, 14}},
           {32, 8, {2, 3, 4, 8, 16, 32}},
           {8, 1, {1, 2, 3, 8}},
           {15, 3, {1, 2, 3, 15}}}) {
    const ModelConfig config = Heads(heads, kv_heads);
    for (const int size : sizes) {
      SCOPED_TRACE(::testing::Message()
                   << heads << " " << kv_heads << " on " << size);
      ASSERT_THAT(CheckTensorParallelSize(config, size), IsOk());
      int64_t end = 0;
      for (int rank = 0; rank < size; ++rank) {
        const ModelShard part = ShardOf(config, {.rank = rank, .size = size});
        EXPECT_EQ(part.heads.begin, end);
        end = part.heads.end;
        const std::vector<int64_t> served = Served(config, part);
        for (const int64_t count : served) EXPECT_EQ(count, served.front());
        EXPECT_GT(served.front(), 0);
        if (size > kv_heads) {
          EXPECT_LE(part.heads.size(), (heads + size - 1) / size);
          EXPECT_GE(part.heads.size(), heads / size);
        }
      }
      EXPECT_EQ(end, heads);
    }
  }
}

TEST(ModelShardTest, FewerRanksThanKeyValueHeadsRepeatNone) {
  const ModelConfig config = Heads(9, 3);
  EXPECT_EQ(ShardOf(config, {.rank = 0, .size = 2}).kv_heads, (Range{0, 1}));
  EXPECT_EQ(ShardOf(config, {.rank = 1, .size = 2}).kv_heads, (Range{1, 3}));
  EXPECT_EQ(ShardOf(config, {.rank = 1, .size = 2}).heads, (Range{3, 9}));
}

TEST(ModelShardTest, SizesThatNothingCanBeDealtOutToAreRefused) {
  const auto expect = [](const ModelConfig& config, int size,
                         const char* message) {
    EXPECT_THAT(CheckTensorParallelSize(config, size),
                IsStatus(absl::StatusCode::kInvalidArgument, message));
  };
  expect(Heads(9, 3), 0, "--tensor-parallel-size 0 < 1");
  expect(Heads(9, 3), 10, "--tensor-parallel-size 10 > 9 query heads");
  expect(Heads(15, 3), 4,
         "--tensor-parallel-size 4: 15 query heads cannot be dealt out evenly "
         "so that the 3 key/value heads");
  ModelConfig config = Heads(9, 3);
  config.ffn = 2;
  expect(config, 3, "--tensor-parallel-size 3 > 2 feed-forward features");
  config.ffn = 103;
  config.vocab = 2;
  expect(config, 3, "--tensor-parallel-size 3 > 2 vocabulary entries");
}

ModelConfig WithExperts(int count, int64_t ffn) {
  ModelConfig config = Heads(12, 12);
  config.moe.shape = {
      .count = count, .per_token = 2, .ffn = ffn, .layers = {true, true}};
  return config;
}

TEST(ModelShardTest, ExpertsAreDealtOutToGroupsOfRanks) {
  ModelConfig config = WithExperts(/*count=*/5, /*ffn=*/7);
  ASSERT_THAT(SetExpertParallelSize(2, /*tensor_parallel_size=*/4, config),
              IsOk());
  const Range experts[] = {{0, 2}, {0, 2}, {2, 5}, {2, 5}};
  const Range features[] = {{0, 3}, {3, 7}, {0, 3}, {3, 7}};
  for (int rank = 0; rank < 4; ++rank) {
    const Shard shard{.rank = rank, .size = 4};
    const ModelShard part = ShardOf(config, shard);
    EXPECT_EQ(part.experts, experts[rank]);
    EXPECT_EQ(part.expert_ffn, features[rank]);
    EXPECT_EQ(part.has_expert_bias, rank % 2 == 0);
    EXPECT_EQ(LocalConfig(config, shard).moe.shape.num_own(),
              experts[rank].size());
  }
  EXPECT_EQ(LargestConfig(config, 4).moe.shape.num_own(), 3);
  EXPECT_EQ(config.moe.shape.num_own(), 5);
  EXPECT_EQ(ShardOf(config, {}).experts, (Range{0, 5}));
}

TEST(ModelShardTest, GroupsThatGetNoExpertsAreRefused) {
  const auto expect = [](int size, int tensor_size, ModelConfig config,
                         const char* message) {
    EXPECT_THAT(SetExpertParallelSize(size, tensor_size, config),
                IsStatus(absl::StatusCode::kInvalidArgument, message));
  };
  expect(0, 4, WithExperts(5, 7), "--expert-parallel-size 0 < 1");
  expect(3, 4, WithExperts(5, 7),
         "--expert-parallel-size 3 does not divide --tensor-parallel-size 4");
  expect(6, 6, WithExperts(5, 7), "--expert-parallel-size 6 > 5 experts");
  expect(2, 2, Heads(9, 3),
         "--expert-parallel-size 2 > 1, but the model has no experts");
}

// Four ranks form two groups. The two ranks of a group split the features of
// the group's experts.
TEST(ModelShardTest, GroupsOfRanksNeedFewerFeatures) {
  ModelConfig config = WithExperts(/*count=*/5, /*ffn=*/2);
  EXPECT_THAT(CheckTensorParallelSize(config, 4),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "--tensor-parallel-size 4 > 2 feed-forward features"));
  ASSERT_THAT(SetExpertParallelSize(2, 4, config), IsOk());
  EXPECT_THAT(CheckTensorParallelSize(config, 4), IsOk());
}

TEST(ModelShardTest, FeaturesOfAnMlpCountOnlyIfALayerHasOne) {
  ModelConfig config = WithExperts(/*count=*/5, /*ffn=*/7);
  config.ffn = 1;
  EXPECT_THAT(CheckTensorParallelSize(config, 4), IsOk());
  config.moe.shape.layers[0] = false;
  EXPECT_THAT(CheckTensorParallelSize(config, 4),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "--tensor-parallel-size 4 > 1 feed-forward features"));
}

TEST(ModelShardTest, LocalWidthsAreThoseOfTheParts) {
  const ModelConfig config = Heads(9, 3);
  const Shard shard{.rank = 1, .size = 4};
  const ModelShape shape = LocalConfig(config, shard).shape();
  const ShapeRanges ranges = LocalRanges(config, shard);
  EXPECT_EQ(shape.q_width, ranges.q.size());
  EXPECT_EQ(shape.kv_width, ranges.kv.size());
  EXPECT_EQ(shape.ffn, ranges.ffn.size());
  EXPECT_EQ(shape.vocab, ranges.vocab.size());
  EXPECT_EQ(shape.hidden, config.hidden);
  EXPECT_EQ(ranges.ffn, shard.Of(103));
  EXPECT_EQ(ranges.q.begin,
            ShardOf(config, shard).heads.begin * config.head_dim);
}

TEST(ModelShardTest, BiasesOfSummedProductsAreOnOneRank) {
  ModelConfig config = Heads(9, 3);
  config.o_bias = config.mlp_bias = config.qkv_bias = true;
  for (int rank = 0; rank < 3; ++rank) {
    int summed = 0;
    int split = 0;
    for (const WeightEntry& entry :
         ListWeights(config, {.rank = rank, .size = 3})) {
      summed += entry.slot == WeightSlot::kOBias ||
                entry.slot == WeightSlot::kDownBias;
      split += entry.slot == WeightSlot::kQkvBias ||
               entry.slot == WeightSlot::kGateUpBias;
    }
    EXPECT_EQ(summed, rank == 0 ? 2 * config.num_layers : 0);
    EXPECT_EQ(split, 5 * config.num_layers);
  }
}

}  // namespace
}  // namespace weft::model_config
