#include <optional>

#include "gtest/gtest.h"
#include "src/dispatch/replay_table.h"

namespace weft::dispatch {
namespace {

constexpr auto kA = static_cast<AdapterKey>(1);
constexpr auto kB = static_cast<AdapterKey>(2);

TEST(StoredRepliesTest, TheOldestGoUntilTheRestFits) {
  StoredReplies replies(/*max_bytes=*/10);
  replies.Add({.adapter = kA, .step = 1, .bytes = 6});
  replies.Add({.adapter = kA, .step = 2, .bytes = 4});
  EXPECT_FALSE(replies.TakeExcess().has_value());
  replies.Add({.adapter = kA, .step = 3, .bytes = 7});
  EXPECT_EQ(replies.TakeExcess()->step, 1u);
  EXPECT_EQ(replies.TakeExcess()->step, 2u);
  EXPECT_FALSE(replies.TakeExcess().has_value());
  EXPECT_EQ(replies.bytes(), 7);
}

TEST(StoredRepliesTest, TheTenantWithTheMostBytesLosesItsOldest) {
  StoredReplies replies(/*max_bytes=*/10);
  replies.Add({.tenant = "bob", .adapter = kA, .step = 1, .bytes = 3});
  replies.Add({.tenant = "alice", .adapter = kB, .step = 1, .bytes = 4});
  replies.Add({.tenant = "alice", .adapter = kB, .step = 2, .bytes = 4});
  std::optional<StoredReplies::Reply> left = replies.TakeExcess();
  ASSERT_TRUE(left.has_value());
  EXPECT_EQ(left->adapter, kB);
  EXPECT_EQ(left->step, 1u);
  EXPECT_FALSE(replies.TakeExcess().has_value());
  // A reply that is larger than the limit drops no reply of another tenant.
  replies.Add({.tenant = "alice", .adapter = kB, .step = 3, .bytes = 99});
  EXPECT_EQ(replies.TakeExcess()->step, 2u);
  EXPECT_FALSE(replies.TakeExcess().has_value());
  EXPECT_EQ(replies.bytes(), 102);
}

TEST(StoredRepliesTest, TheLatestStaysHoweverBigItIs) {
  StoredReplies replies(/*max_bytes=*/10);
  replies.Add({.adapter = kA, .step = 1, .bytes = 99});
  EXPECT_FALSE(replies.TakeExcess().has_value());
}

TEST(StoredRepliesTest, WhatIsRemovedMakesRoom) {
  StoredReplies replies(/*max_bytes=*/10);
  replies.Add({.adapter = kA, .step = 1, .bytes = 9});
  replies.Add({.adapter = kA, .step = 2, .bytes = 9});
  replies.Add({.adapter = kB, .step = 1, .bytes = 1});
  replies.Remove(kA, 1);
  replies.Remove(kA, 1);
  EXPECT_EQ(replies.bytes(), 10);
  EXPECT_FALSE(replies.TakeExcess().has_value());
  replies.RemoveAll(kA);
  EXPECT_EQ(replies.bytes(), 1);
}

}  // namespace
}  // namespace weft::dispatch
