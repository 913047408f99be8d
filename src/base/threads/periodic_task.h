// A task that one thread posts to another thread at a fixed interval. While a
// posted task waits or runs, the task is not posted again.
//
//   PeriodicTask look(absl::Seconds(1), [] { LookAtTheDisk(); });
//   look.PostWhenDue(SteadyNow(), [&](auto task) { worker.Post(task); });
#ifndef WEFT_SRC_BASE_THREADS_PERIODIC_TASK_H_
#define WEFT_SRC_BASE_THREADS_PERIODIC_TASK_H_

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/time/time.h"

namespace weft {

class PeriodicTask {
 public:
  PeriodicTask(absl::Duration interval, std::function<void()> run)
      : interval_(interval), run_(std::move(run)) {}

  // Passes the task to `post`. Does nothing if less than `interval` has passed
  // since the last post, or if the last posted task has not ended. A posted
  // task may outlive this object. Threads: one thread makes all calls.
  void PostWhenDue(absl::Time now,
                   const std::function<void(std::function<void()>)>& post) {
    if (now < due_ || is_posted_->load()) return;
    due_ = now + interval_;
    is_posted_->store(true);
    post([run = run_, is_posted = is_posted_] {
      run();
      is_posted->store(false);
    });
  }

 private:
  const absl::Duration interval_;
  const std::function<void()> run_;
  absl::Time due_ = absl::InfinitePast();
  const std::shared_ptr<std::atomic<bool>> is_posted_ =
      std::make_shared<std::atomic<bool>>(false);
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_THREADS_PERIODIC_TASK_H_
