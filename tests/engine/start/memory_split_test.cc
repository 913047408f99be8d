#include "src/engine/start/memory_split.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

// Roughly the needs of a model with 8 billion parameters in 32 layers on a
// device of 80 GB. If all layers are recomputed, the micro-batches need 2, 2, 4
// and 8 GiB.
MemoryNeeds Large() {
  return {.available = 56 * kGiB,
          .adapter = 3 * kGiB,
          .context = 4 * kGiB,
          .usual_cache = 8 * kGiB,
          .most_cache = 64 * 4 * kGiB,
          .decode_graphs = kGiB,
          .batches = {{512, 3 * kGiB, 32 * kMiB},
                      {4096, 10 * kGiB, 256 * kMiB},
                      {8192, 20 * kGiB, 512 * kMiB},
                      {16384, 40 * kGiB, 1024 * kMiB}},
          .good_batch = 10 * kGiB,
          .most_recomputed = 32,
          .most_adapters = 64};
}

MemorySplit Split(const MemoryNeeds& needs) {
  return SplitMemory(needs).value();
}

TEST(SplitMemoryTest, GoesInTheOrderOfTheHeader) {
  // In GiB: the reserve is 4, which is 512 MiB plus a sixteenth of 56. One
  // adapter, one context and the shortest batch leave 43. Then graphs leave 42,
  // a batch of 4096 tokens leaves 34, the cache leaves 30, and seven adapters
  // leave 9. A batch of 8192 needs 10 more, so three adapters follow instead.
  const MemorySplit split = Split(Large());
  EXPECT_EQ(split.reserve, 4 * kGiB);
  EXPECT_EQ(split.batch_tokens, 4096);
  EXPECT_EQ(split.recomputed_layers, 0);
  EXPECT_EQ(split.activations, 10 * kGiB);
  EXPECT_EQ(split.cache, 8 * kGiB);
  EXPECT_EQ(split.decode_graphs, kGiB);
  EXPECT_EQ(split.num_adapters, 11);
  EXPECT_EQ(split.adapters, 33 * kGiB);
  EXPECT_EQ(split.Total(), Large().available);
  EXPECT_EQ(split.batch_limit, Limit::kMemory);
  EXPECT_EQ(split.cache_limit, Limit::kNothing);
  EXPECT_EQ(split.graphs_limit, Limit::kNothing);
  EXPECT_EQ(split.adapters_limit, Limit::kMemory);
}

TEST(SplitMemoryTest, ALongerBatchComesAfterAFewAdapters) {
  MemoryNeeds needs = Large();
  needs.available = 64 * kGiB;
  // In GiB: 8 more are available, but the reserve is 0.5 larger. So each step
  // has 7.5 more than in the test above, and eight adapters leave 16.5. A batch
  // of 8192 takes 10 more, and two more adapters take 6. The rest is too little
  // for another adapter and goes to the cache.
  const MemorySplit split = Split(needs);
  EXPECT_EQ(split.batch_tokens, 8192);
  EXPECT_EQ(split.recomputed_layers, 0);
  EXPECT_EQ(split.activations, 20 * kGiB);
  EXPECT_EQ(split.num_adapters, 10);
  EXPECT_EQ(split.cache, 8 * kGiB + kGiB / 2);
  EXPECT_EQ(split.Total(), needs.available);
}

TEST(SplitMemoryTest, RecomputesAsFewLayersAsFit) {
  MemoryNeeds needs = Large();
  needs.available = 16 * kGiB;
  // In GiB: the reserve of 1.5 and the required 9 leave 5.5, and graphs leave
  // 4.5. Activations get these 4.5 and the 2 that they require. Without
  // recomputation they need 10, so 14 layers of 0.25 are recomputed.
  const MemorySplit split = Split(needs);
  EXPECT_EQ(split.batch_tokens, 4096);
  EXPECT_EQ(split.recomputed_layers, 14);
  EXPECT_EQ(split.activations, 6 * kGiB + kGiB / 2);
  EXPECT_EQ(split.num_adapters, 1);
  EXPECT_EQ(split.cache, 4 * kGiB);
  EXPECT_EQ(split.decode_graphs, kGiB);
  EXPECT_EQ(split.batch_limit, Limit::kMemory);
  EXPECT_EQ(split.cache_limit, Limit::kMemory);
  EXPECT_EQ(split.graphs_limit, Limit::kNothing);
}

TEST(SplitMemoryTest, AShortBatchIsTheLastResort) {
  MemoryNeeds needs = Large();
  needs.available = 11 * kGiB;
  needs.batches[1].layer_saving = 128 * kMiB;  // 4096 tokens now take at least
                                               // 6 GiB, which do not fit.
  // In GiB: 9 are required and 1.1875 are the reserve. The remaining 0.8125 are
  // less than the 1 that would keep all layers of the shortest batch. So six
  // layers are recomputed.
  const MemorySplit split = Split(needs);
  EXPECT_EQ(split.batch_tokens, 512);
  EXPECT_EQ(split.recomputed_layers, 6);
  // There is no room for the GiB that graphs take.
  EXPECT_EQ(split.decode_graphs, 0);
  EXPECT_EQ(split.graphs_limit, Limit::kMemory);
}

TEST(SplitMemoryTest, NobodyGetsMoreThanIsOfUse) {
  MemoryNeeds needs = Large();
  needs.adapter = kGiB / 64;
  needs.context = kGiB / 64;
  needs.usual_cache = kGiB / 2;
  needs.most_cache = kGiB;
  const MemorySplit split = Split(needs);
  EXPECT_EQ(split.num_adapters, 64);
  EXPECT_EQ(split.cache, kGiB);
  EXPECT_EQ(split.batch_tokens, 16384);
  EXPECT_EQ(split.batch_limit, Limit::kNothing);
  EXPECT_EQ(split.adapters_limit, Limit::kNothing);
  // Activations get the rest, because sequences may be longer than any batch.
  EXPECT_GT(split.activations, 40 * kGiB);
  EXPECT_EQ(split.Total(), needs.available);
}

TEST(SplitMemoryTest, FollowsThePolicyOfRecomputing) {
  MemoryNeeds needs = Large();
  // With --gradient-checkpointing=all, BatchNeeds::bytes is the memory with all
  // layers recomputed.
  needs.least_recomputed = 32;
  needs.batches = {{512, 2 * kGiB, 32 * kMiB},
                   {4096, 2 * kGiB + 1, 256 * kMiB},
                   {16384, 8 * kGiB, 1024 * kMiB}};
  needs.good_batch = 2 * kGiB + 1;
  const MemorySplit all = Split(needs);
  EXPECT_EQ(all.batch_tokens, 16384);
  EXPECT_EQ(all.recomputed_layers, 32);
  // With --gradient-checkpointing=off, a batch must fit without recomputation.
  needs = Large();
  needs.available = 16 * kGiB;
  needs.most_recomputed = 0;
  const MemorySplit off = Split(needs);
  EXPECT_EQ(off.batch_tokens, 512);
  EXPECT_EQ(off.recomputed_layers, 0);
}

TEST(SplitMemoryTest, WhatTheOperatorHasSetStays) {
  MemoryNeeds needs = Large();
  needs.wanted_adapters = 2;
  needs.wanted_cache = kGiB;  // This is less than a context.
  needs.wanted_activations = 4 * kGiB;
  const MemorySplit split = Split(needs);
  EXPECT_EQ(split.num_adapters, 2);
  EXPECT_EQ(split.adapters, 6 * kGiB);
  EXPECT_EQ(split.adapters_limit, Limit::kFlag);
  EXPECT_EQ(split.cache, kGiB);
  EXPECT_EQ(split.cache_limit, Limit::kFlag);
  EXPECT_EQ(split.activations, 4 * kGiB);
  EXPECT_EQ(split.batch_tokens, 4096);
  EXPECT_EQ(split.recomputed_layers, 24);
  EXPECT_EQ(split.batch_limit, Limit::kFlag);
  EXPECT_LT(split.Total(), needs.available);
}

TEST(SplitMemoryTest, ABudgetForNoBatchIsTheOperatorsBusiness) {
  MemoryNeeds needs = Large();
  needs.wanted_activations = kGiB;
  const MemorySplit split = Split(needs);
  EXPECT_EQ(split.activations, kGiB);
  EXPECT_EQ(split.batch_tokens, 512);
  EXPECT_EQ(split.recomputed_layers, 32);
}

TEST(SplitMemoryTest, ALongBatchOfTheOperatorsRecomputesWhatItMust) {
  MemoryNeeds needs = Large();
  needs.batches = {{16384, 40 * kGiB, 1024 * kMiB}};
  // In GiB: the batch requires 8. It first gets 10, as a batch of 4096 tokens
  // would, so 30 layers are recomputed. Graphs, cache and seven adapters leave
  // 9, so nine of the 30 layers are kept after all.
  const MemorySplit split = Split(needs);
  EXPECT_EQ(split.batch_tokens, 16384);
  EXPECT_EQ(split.activations, 19 * kGiB);
  EXPECT_EQ(split.recomputed_layers, 21);
  EXPECT_EQ(split.num_adapters, 8);
  EXPECT_EQ(split.batch_limit, Limit::kMemory);
}

TEST(SplitMemoryTest, WantedAdaptersShareWhatThereIsForThem) {
  MemoryNeeds needs = Large();
  needs.wanted_adapters = 64;
  const MemorySplit split = Split(needs);
  EXPECT_EQ(split.num_adapters, 64);
  EXPECT_EQ(split.adapters, 33 * kGiB);
  EXPECT_EQ(split.Total(), needs.available);
}

TEST(SplitMemoryTest, RefusesWhatCannotFitWithFlagsAndBytes) {
  MemoryNeeds needs = Large();
  needs.context = needs.usual_cache = 48 * kGiB;
  const absl::Status status = SplitMemory(needs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("leaves 60129542144 bytes"),
            HasSubstr("(--device-memory-share)"),
            HasSubstr("at least 61203283968 are needed"),
            HasSubstr("3221225472 for an adapter (--max-rank)"),
            HasSubstr("51539607552 for keys and values (--kv-cache-bytes, "
                      "--max-context)"),
            HasSubstr("2147483648 for activations (--memory-budget")));
}

TEST(SplitMemoryTest, FitsToTheLastByte) {
  MemoryNeeds needs = Large();
  needs.wanted_cache = 4 * kGiB;
  needs.wanted_activations = 45 * kGiB;
  EXPECT_TRUE(SplitMemory(needs).ok());
  ++needs.wanted_activations;
  EXPECT_FALSE(SplitMemory(needs).ok());
  needs = Large();
  needs.available = 0;
  EXPECT_FALSE(SplitMemory(needs).ok());
}

}  // namespace
}  // namespace weft::engine
