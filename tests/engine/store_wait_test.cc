#include "src/engine/store_wait.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

constexpr absl::Duration kSecond = absl::Seconds(1);

class StoreWaitTest : public ::testing::Test {
 protected:
  void Add() {
    wait_.Add(now_, [this](const absl::Status& status) {
      ++runs_;
      status_ = status;
    });
  }
  // Returns how often a task has run after so long.
  int After(absl::Duration time) {
    now_ += time;
    wait_.GoOn(now_);
    return runs_;
  }

  bool answers_ = true;
  absl::Time now_ = absl::UnixEpoch();
  StoreWait wait_{[this] { return answers_; }};
  int runs_ = 0;
  absl::Status status_;
};

TEST_F(StoreWaitTest, WaitsForAPauseAndForTheStore) {
  Add();
  EXPECT_EQ(After(0.9 * kSecond), 0);
  answers_ = false;
  EXPECT_EQ(After(1000 * kSecond), 0);
  answers_ = true;
  EXPECT_EQ(After(kSecond), 1);
  EXPECT_EQ(After(kSecond), 1);
  EXPECT_THAT(status_, IsOk());
}

TEST_F(StoreWaitTest, TasksOfOneOutageRunTogether) {
  Add();
  EXPECT_EQ(After(0.9 * kSecond), 0);
  Add();
  EXPECT_EQ(After(0.2 * kSecond), 2);
}

// An object that a store cannot read, though it answers, must not keep the I/O
// thread from everything else.
TEST_F(StoreWaitTest, ThePauseGrowsWhileTriesFail) {
  int tries = 0;
  for (const int seconds : {1, 2, 4, 8, 16, 30, 30}) {
    Add();
    EXPECT_EQ(After((seconds - 0.1) * kSecond), tries) << seconds;
    EXPECT_EQ(After(0.1 * kSecond), ++tries) << seconds;
  }
  // After an outage all go on at once.
  Add();
  answers_ = false;
  (void)After(kSecond);
  answers_ = true;
  EXPECT_EQ(After(kSecond), ++tries);
  // What fails much later does not come from a try.
  (void)After(100 * kSecond);
  Add();
  EXPECT_EQ(After(kSecond), ++tries);
}

TEST_F(StoreWaitTest, TheEndOfTheEngineEndsTheWait) {
  Add();
  wait_.Close(absl::UnavailableError("stopped"));
  EXPECT_EQ(runs_, 1);
  EXPECT_EQ(status_.code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace weft::engine
