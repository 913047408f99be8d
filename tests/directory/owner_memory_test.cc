#include "src/directory/owner_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/support/status_matchers.h"

namespace weft::directory {
namespace {

TEST(RecentValuesTest, OneCallerLearnsAnOldValueAgain) {
  RecentValues<std::string, int> values(absl::Seconds(1), absl::Seconds(5), 2);
  absl::Time now = absl::FromUnixSeconds(100);
  bool again = true;
  EXPECT_EQ(values.Get("a", now, &again), std::nullopt);
  EXPECT_FALSE(again);
  values.Put("a", 1, now);
  EXPECT_EQ(values.Get("a", now, &again), 1);
  EXPECT_FALSE(again);
  now += absl::Seconds(2);
  EXPECT_EQ(values.Get("a", now, &again), 1);
  EXPECT_TRUE(again);
  EXPECT_EQ(values.Get("a", now, &again), 1);
  EXPECT_FALSE(again);
  now += absl::Seconds(3);
  EXPECT_EQ(values.Get("a", now, &again), std::nullopt);
}

TEST(RecentValuesTest, KeepsAtMostSoMany) {
  RecentValues<std::string, int> values(absl::Seconds(1), absl::Seconds(5), 2);
  const absl::Time now = absl::FromUnixSeconds(100);
  bool again = false;
  values.Put("a", 1, now);
  values.Put("b", 2, now);
  values.Put("c", 3, now);
  EXPECT_EQ(values.Get("c", now, &again), std::nullopt);
  values.Put("a", 4, now);
  EXPECT_EQ(values.Get("a", now, &again), 4);
  // What is too old makes room.
  values.Put("c", 5, now + absl::Seconds(6));
  EXPECT_EQ(values.Get("c", now + absl::Seconds(6), &again), 5);
}

// A store with the owners of logs.
class OwnerMemoryTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::string> Found(int log) {
    std::promise<absl::StatusOr<std::string>> found;
    memory_.FindOwner(
        absl::StrCat("unit", log), [log] { return log; },
        [&found](const absl::StatusOr<std::string>& owner) {
          found.set_value(owner);
        });
    return found.get_future().get();
  }

  std::map<int, std::string> owners_ = {{1, "one:1"}};
  std::atomic<int> reads_{0};
  std::atomic<int> finds_{0};
  OwnerMemory memory_{[this](int log) -> absl::StatusOr<std::string> {
                        ++reads_;
                        const auto found = owners_.find(log);
                        return found == owners_.end() ? "" : found->second;
                      },
                      [this](const std::string& /*adapter*/) { ++finds_; }};
};

TEST_F(OwnerMemoryTest, KnowsWhatItWasTold) {
  EXPECT_EQ(memory_.OwnerOf("t~a"), "");
  memory_.Note("t~a", 1, "one:1");
  EXPECT_EQ(memory_.OwnerOf("t~a"), "one:1");
  EXPECT_EQ(memory_.OwnerOf("t~b"), "");
  // All adapters of a log share what is known of its owner.
  memory_.Note("t~b", 1, "other:1");
  EXPECT_EQ(memory_.OwnerOf("t~a"), "other:1");
  memory_.Note("t~b", 1, "");
  EXPECT_EQ(memory_.OwnerOf("t~a"), "");
  memory_.Note("t~b", 1, "one:1");
  memory_.Forget("t~a");
  EXPECT_EQ(memory_.OwnerOf("t~a"), "");
  EXPECT_EQ(memory_.OwnerOf("t~b"), "one:1");
  EXPECT_EQ(reads_, 0) << "it must not wait for the store";
}

TEST_F(OwnerMemoryTest, ReadsAnOwnerOnce) {
  EXPECT_EQ(Found(1).value(), "one:1");
  EXPECT_EQ(Found(1).value(), "one:1");
  EXPECT_EQ(reads_, 1);
  EXPECT_THAT(Found(2), IsStatus(absl::StatusCode::kUnavailable, "log 2"));
}

TEST_F(OwnerMemoryTest, ReadsAnOldOwnerAgainWhileItIsUsed) {
  EXPECT_EQ(Found(1).value(), "one:1");
  owners_[1] = "next:1";
  std::string owner;
  const absl::Time limit = absl::Now() + absl::Seconds(20);
  while (owner != "next:1" && absl::Now() < limit) {
    owner = Found(1).value();
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_EQ(owner, "next:1");
  EXPECT_LT(reads_, 4);
}

}  // namespace
}  // namespace weft::directory
