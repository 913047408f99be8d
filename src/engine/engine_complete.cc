// The end of work: results and errors to those who wait for them.
#include <memory>
#include <utility>

#include "src/engine/engine_impl.h"

namespace weft::engine {

void EngineImpl::CompleteStep(uint64_t work_id,
                              absl::StatusOr<ErasedResult> result) {
  std::unique_ptr<StepWork> work;
  uint64_t last_step = 0;
  {
    MutexLock lock(&mu_);
    scheduler_.Finished(work_id, result.ok());
    const auto it = steps_.find(work_id);
    if (it == steps_.end()) return;  // Its adapter was deleted meanwhile.
    work = std::move(it->second);
    steps_.erase(it);
    if (!work->orphaned) residency_.Used(work->adapter_id, sched::kTraining);
    const auto table = replays_.find(work->adapter_id);
    if (work->step > 0 && !work->orphaned && table != replays_.end()) {
      if (result.ok()) {
        table->second.Complete(work->step, *result);
      } else {
        table->second.Fail(work->step);
      }
    }
    last_step = scheduler_.LastStep(work->adapter_id).value_or(0);
  }
  adapters_.Publish(work->adapter_id, last_step);
  completions_.Post(
      [waiters = std::move(work->waiters), result = std::move(result)] {
        // Whoever joined the first call's step is told that it ran once.
        for (const Waiter& waiter : waiters) {
          waiter.done(result, /*replayed=*/&waiter != &waiters.front());
        }
      });
}

void EngineImpl::DropStep(uint64_t work_id, const absl::Status& status) {
  const auto it = steps_.find(work_id);
  if (it == steps_.end()) return;
  std::unique_ptr<StepWork> work = std::move(it->second);
  steps_.erase(it);
  const auto table = replays_.find(work->adapter_id);
  if (work->step > 0 && table != replays_.end()) {
    table->second.Fail(work->step);
  }
  completions_.Post([waiters = std::move(work->waiters), status] {
    for (const Waiter& waiter : waiters) waiter.done(status, false);
  });
  // What waited behind it may be able to run now.
  if (scheduler_.ReadyKinds(work->adapter_id) != 0) {
    WantAdapter(work->adapter_id);
  }
}

void EngineImpl::DropSample(uint64_t work_id, const absl::Status& status) {
  const auto it = samples_.find(work_id);
  if (it == samples_.end()) return;
  completions_.Post(
      [done = std::move(it->second->done), status] { done(status); });
  samples_.erase(it);
}

void EngineImpl::AnswerDrainWhenIdle() {
  if (!draining_ || drain_waiters_.empty() || !steps_.empty() ||
      !samples_.empty() || residency_.has_waiters() || pending_io_ > 0) {
    return;
  }
  for (Callback<bool>& done : std::exchange(drain_waiters_, {})) {
    completions_.Post([done = std::move(done)] { done(true); });
  }
}

}  // namespace weft::engine
