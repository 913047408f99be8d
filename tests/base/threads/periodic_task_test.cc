#include "src/base/threads/periodic_task.h"

#include <functional>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

class PeriodicTaskTest : public ::testing::Test {
 protected:
  void PostAt(int seconds) {
    task_.PostWhenDue(absl::FromUnixSeconds(seconds),
                      [this](std::function<void()> task) {
                        posted_.push_back(std::move(task));
                      });
  }
  void RunPosted() {
    for (const std::function<void()>& task : std::exchange(posted_, {})) task();
  }

  int runs_ = 0;
  PeriodicTask task_{absl::Seconds(2), [this] { ++runs_; }};
  std::vector<std::function<void()>> posted_;
};

TEST_F(PeriodicTaskTest, IsPostedOnceInEachInterval) {
  for (int second = 0; second < 6; ++second) {
    PostAt(second);
    RunPosted();
  }
  EXPECT_EQ(runs_, 3);
}

TEST_F(PeriodicTaskTest, DoesNotPileUpBehindAThreadThatHangs) {
  for (int second = 0; second < 100; ++second) PostAt(second);
  EXPECT_EQ(posted_.size(), 1u);
  EXPECT_EQ(runs_, 0);
  RunPosted();
  PostAt(100);
  EXPECT_EQ(posted_.size(), 1u);
  RunPosted();
  EXPECT_EQ(runs_, 2);
}

TEST_F(PeriodicTaskTest, IsNotPostedWhileItRuns) {
  PeriodicTask* itself = nullptr;
  int posts = 0;
  PeriodicTask task(absl::ZeroDuration(), [&] {
    itself->PostWhenDue(absl::UnixEpoch(), [&](auto) { ++posts; });
  });
  itself = &task;
  task.PostWhenDue(absl::UnixEpoch(), [&](const auto& run) { run(); });
  EXPECT_EQ(posts, 0);
}

}  // namespace
}  // namespace weft
