#include "src/engine/samplers/sampler_table.h"

#include <gtest/gtest.h>

namespace weft::engine {
namespace {

constexpr auto kA = AdapterKey{1};
constexpr auto kB = AdapterKey{2};
constexpr auto kC = AdapterKey{3};

Sampler Of(const std::string& name) {
  return {.name = {"adapter", name}, .created_at = absl::UnixEpoch()};
}

TEST(SamplerTable, TheLongestUnusedOfATenantLeaves) {
  SamplerTable table(2);
  table.Add(kA, "t", 10, Of("a"));
  EXPECT_FALSE(table.full());
  table.Add(kB, "t", 10, Of("b"));
  EXPECT_TRUE(table.full());
  table.Begin(kA);
  EXPECT_FALSE(table.End(kA));
  EXPECT_EQ(table.Evict("t"), kB);
  EXPECT_EQ(table.Find({"adapter", "b"}), std::nullopt);
  EXPECT_EQ(table.Find({"adapter", "a"}), kA);
  EXPECT_EQ(table.size(), 1);
}

TEST(SamplerTable, WhatSamplesUseStays) {
  SamplerTable table(2);
  table.Add(kA, "t", 10, Of("a"));
  table.Add(kB, "t", 10, Of("b"));
  table.Begin(kA);
  table.Begin(kA);
  table.Begin(kB);
  EXPECT_EQ(table.Evict("t"), std::nullopt);
  EXPECT_EQ(table.Evict("other"), std::nullopt);
  EXPECT_FALSE(table.End(kA));
  EXPECT_EQ(table.Evict("t"), std::nullopt);
  EXPECT_FALSE(table.End(kA));
  EXPECT_EQ(table.Evict("other"), kA);
}

TEST(SamplerTable, TheTenantWithTheMostBytesLosesOne) {
  SamplerTable table(3);
  table.Add(kA, "small", 10, Of("a"));
  table.Add(kB, "large", 10, Of("b"));
  table.Add(kC, "large", 10, Of("c"));
  // The large one takes none from a smaller one, even if it uses all its own.
  table.Begin(kB);
  table.Begin(kC);
  EXPECT_EQ(table.Evict("large"), std::nullopt);
  EXPECT_EQ(table.Evict("new"), kA);
  table.Add(kA, "small", 10, Of("a"));
  EXPECT_FALSE(table.End(kC));
  EXPECT_EQ(table.Evict("small"), kC);
  // Both have as much now, so each loses its own.
  EXPECT_FALSE(table.End(kB));
  EXPECT_EQ(table.Evict("small"), kA);
}

TEST(SamplerTable, ARetiredOneGoesWithItsLastSample) {
  SamplerTable table(2);
  table.Add(kA, "t", 10, Of("a"));
  table.Begin(kA);
  table.Begin(kA);
  EXPECT_FALSE(table.Retire(kA));
  EXPECT_EQ(table.Find({"adapter", "a"}), std::nullopt);
  table.Add(kB, "t", 10, Of("a"));
  EXPECT_EQ(table.Find({"adapter", "a"}), kB);
  EXPECT_FALSE(table.End(kA));
  EXPECT_TRUE(table.full());
  EXPECT_TRUE(table.End(kA));
  EXPECT_EQ(table.size(), 1);
  EXPECT_TRUE(table.Retire(kB));
  EXPECT_EQ(table.size(), 0);
}

}  // namespace
}  // namespace weft::engine
