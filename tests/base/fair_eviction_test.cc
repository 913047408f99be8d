#include "src/base/fair_eviction.h"

#include <string>

#include "gtest/gtest.h"

namespace weft {
namespace {

using Eviction = FairEviction<std::string>;

std::string Evict(Eviction& entries) {
  return entries.Remove(entries.Victim());
}

TEST(FairEvictionTest, TheOwnerWithTheMostBytesLosesItsOldest) {
  Eviction entries;
  entries.Add("small", "s1", 4);
  for (const char* value : {"b1", "b2", "b3"}) entries.Add("big", value, 2);
  EXPECT_EQ(entries.bytes(), 10);
  EXPECT_EQ(Evict(entries), "b1");
  // Among equals, the name decides.
  EXPECT_EQ(Evict(entries), "b2");
  EXPECT_EQ(Evict(entries), "s1");
  EXPECT_EQ(Evict(entries), "b3");
  EXPECT_EQ(entries.bytes(), 0);
  EXPECT_TRUE(entries.accounts().empty());
}

TEST(FairEvictionTest, BytesDecideAndNotTheNumberOfEntries) {
  Eviction entries;
  for (const char* value : {"a", "b", "c"}) entries.Add("many", value, 1);
  entries.Add("few", "d", 4);
  EXPECT_EQ(entries.Victim().value(), "d");
}

TEST(FairEvictionTest, WhatIsRenewedBecomesTheNewest) {
  Eviction entries;
  const Eviction::Place first = entries.Add("o", "first", 1);
  entries.Add("o", "second", 1);
  entries.Renew(first);
  EXPECT_EQ(entries.bytes(), 2);
  EXPECT_EQ(Evict(entries), "second");
  EXPECT_EQ(Evict(entries), "first");
}

TEST(FairEvictionTest, WhatIsRemovedCountsNoMore) {
  Eviction entries;
  const Eviction::Place first = entries.Add("a", "first", 5);
  const Eviction::Place second = entries.Add("a", "second", 5);
  entries.Add("b", "third", 6);
  EXPECT_EQ(entries.Remove(second), "second");
  EXPECT_EQ(first.value(), "first");  // Other places stay valid.
  EXPECT_EQ(entries.accounts().at("a").bytes, 5);
  EXPECT_EQ(entries.bytes(), 11);
  EXPECT_EQ(Evict(entries), "third");
  EXPECT_EQ(entries.Remove(first), "first");
  EXPECT_TRUE(entries.accounts().empty());
}

}  // namespace
}  // namespace weft
