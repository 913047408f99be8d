#include "src/engine/store_wait.h"

#include <algorithm>

namespace weft::engine {
namespace {

constexpr absl::Duration kFirstPause = absl::Seconds(1);
constexpr absl::Duration kLongestPause = absl::Seconds(30);
// A task that comes later after a try does not come from it.
constexpr absl::Duration kLongestTry = absl::Minutes(1);

}  // namespace

void StoreWait::Add(absl::Time now, dispatch::EngineTask task) {
  if (tasks_.empty()) {
    if (now - ran_ > kLongestTry) pause_ = absl::ZeroDuration();
    pause_ = std::clamp(2 * pause_, kFirstPause, kLongestPause);
    due_ = now + pause_;
  }
  tasks_.push_back(std::move(task));
}

void StoreWait::GoOn(absl::Time now) {
  if (tasks_.empty()) return;
  if (!answers_()) {
    pause_ = absl::ZeroDuration();
    due_ = std::min(due_, now + kFirstPause);
    return;
  }
  if (now < due_) return;
  ran_ = now;
  for (const dispatch::EngineTask& task : std::exchange(tasks_, {})) {
    task(absl::OkStatus());
  }
}

void StoreWait::Close(const absl::Status& status) {
  for (const dispatch::EngineTask& task : std::exchange(tasks_, {})) {
    task(status);
  }
}

}  // namespace weft::engine
