#include "src/engine/memory_split.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

// About a model of 8 billion parameters on a device of 80 GB.
constexpr MemoryNeeds kLarge = {.available = 56 * kGiB,
                                .adapter = 3 * kGiB,
                                .context = 4 * kGiB,
                                .activations = 2 * kGiB,
                                .full_batch = 8 * kGiB,
                                .most_adapters = 64,
                                .most_cache = 64 * 4 * kGiB};

int64_t Sum(const MemorySplit& split) {
  return split.adapters + split.cache + split.activations + split.reserve;
}

TEST(SplitMemoryTest, GivesEverythingAwayButAReserve) {
  const MemorySplit split = SplitMemory(kLarge).value();
  // 512 MiB and a sixteenth; a quarter of the rest to the cache.
  EXPECT_EQ(split.reserve, 4 * kGiB);
  EXPECT_EQ(split.cache, 13 * kGiB);
  EXPECT_EQ(split.num_adapters, 10);
  EXPECT_EQ(split.adapters, 30 * kGiB);
  EXPECT_EQ(split.activations, 9 * kGiB);
  EXPECT_EQ(Sum(split), kLarge.available);
}

TEST(SplitMemoryTest, NobodyGetsMoreThanIsOfUse) {
  MemoryNeeds needs = kLarge;
  needs.adapter = kGiB / 64;
  needs.context = kGiB / 64;
  needs.most_cache = kGiB;
  const MemorySplit split = SplitMemory(needs).value();
  EXPECT_EQ(split.num_adapters, 64);
  EXPECT_EQ(split.cache, kGiB);
  EXPECT_EQ(Sum(split), needs.available);
}

TEST(SplitMemoryTest, ALongContextMayTakeMoreThanItsShare) {
  MemoryNeeds needs = kLarge;
  needs.context = needs.most_cache = 30 * kGiB;
  const MemorySplit split = SplitMemory(needs).value();
  EXPECT_EQ(split.cache, 30 * kGiB);
  EXPECT_EQ(Sum(split), needs.available);
}

TEST(SplitMemoryTest, LeavesTheLeastToEverybodyBeforeAnybodyGrows) {
  MemoryNeeds needs = kLarge;
  needs.activations = 45 * kGiB;
  const MemorySplit split = SplitMemory(needs).value();
  EXPECT_EQ(split.activations, 45 * kGiB);
  EXPECT_EQ(split.num_adapters, 1);
  EXPECT_EQ(split.cache, 4 * kGiB);
}

TEST(SplitMemoryTest, WhatTheOperatorHasSetStays) {
  MemoryNeeds needs = kLarge;
  needs.wanted_adapters = 2;
  needs.wanted_cache = kGiB;  // Less than a context.
  needs.wanted_activations = kGiB;
  const MemorySplit split = SplitMemory(needs).value();
  EXPECT_EQ(split.num_adapters, 2);
  EXPECT_EQ(split.adapters, 6 * kGiB);
  EXPECT_EQ(split.cache, kGiB);
  EXPECT_EQ(split.activations, kGiB);
}

TEST(SplitMemoryTest, WantedAdaptersShareWhatThereIsForThem) {
  MemoryNeeds needs = kLarge;
  needs.wanted_adapters = 64;
  const MemorySplit split = SplitMemory(needs).value();
  EXPECT_EQ(split.num_adapters, 64);
  EXPECT_EQ(split.adapters, 30 * kGiB);
  EXPECT_EQ(Sum(split), needs.available);
}

TEST(SplitMemoryTest, RefusesWhatCannotFitWithFlagsAndBytes) {
  MemoryNeeds needs = kLarge;
  needs.context = 48 * kGiB;
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
  MemoryNeeds needs = kLarge;
  needs.wanted_cache = 4 * kGiB;
  needs.wanted_activations = 45 * kGiB;
  EXPECT_TRUE(SplitMemory(needs).ok());
  ++needs.wanted_activations;
  EXPECT_FALSE(SplitMemory(needs).ok());
  needs = {.available = -1, .adapter = 1, .context = 1, .activations = 1};
  EXPECT_FALSE(SplitMemory(needs).ok());
}

}  // namespace
}  // namespace weft::engine
