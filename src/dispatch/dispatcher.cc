#include "src/dispatch/dispatcher.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "src/base/trace_id.h"

namespace weft::dispatch {

Dispatcher::Dispatcher(const Options& options, Environment environment)
    : state_(options, std::move(environment)),
      steps_(&state_),
      samples_(&state_),
      adapters_(&state_),
      recovery_(&state_) {}

void Dispatcher::Post(EngineTask task) {
  absl::Status closed;
  {
    MutexLock lock(&state_.mu);
    closed = state_.closed;
    if (closed.ok()) state_.tasks.push_back(KeepTrace(std::move(task)));
  }
  if (closed.ok()) {
    state_.changed.NotifyAll();
  } else {
    task(closed);  // NOLINT(bugprone-use-after-move): moved only while open.
  }
}

absl::Status Dispatcher::CheckOpen() const {
  MutexLock lock(&state_.mu);
  return state_.CheckOpen();
}

void Dispatcher::Drain(Callback<bool> done) {
  {
    MutexLock lock(&state_.mu);
    state_.draining = true;
    state_.drain_waiters.push_back(std::move(done));
    // A step that waits for a missing number cannot run any more. A kept one
    // stays, also for the next process; another one's caller gives it to that.
    std::vector<uint64_t> behind_gaps;
    for (const auto& [id, work] : state_.steps) {
      if (work->step > 0 && !work->note &&
          state_.scheduler.Ahead(work->adapter, work->step) > 0 &&
          state_.scheduler.Remove(id)) {
        behind_gaps.push_back(id);
      }
    }
    for (const uint64_t id : behind_gaps) state_.Drop(id, state_.CheckOpen());
  }
  state_.changed.NotifyAll();
}

void Dispatcher::Finish(Callback<bool> done) {
  {
    MutexLock lock(&state_.mu);
    state_.finishing = true;
  }
  Drain(std::move(done));
}

void Dispatcher::Undrain() {
  MutexLock lock(&state_.mu);
  state_.draining = false;
  for (Callback<bool>& done : std::exchange(state_.drain_waiters, {})) {
    state_.env.post_reply([done = std::move(done)] {
      done(absl::AbortedError("the server takes new work again: undrain"));
    });
  }
}

std::shared_ptr<void> Dispatcher::Hold() {
  MutexLock lock(&state_.mu);
  const bool late = state_.draining;
  ++state_.holds;
  state_.late_holds += late ? 1 : 0;
  return {nullptr, [this, late](void*) {
            {
              MutexLock release(&state_.mu);
              --state_.holds;
              state_.late_holds -= late ? 1 : 0;
            }
            state_.changed.NotifyAll();
          }};
}

void Dispatcher::Stop() {
  {
    MutexLock lock(&state_.mu);
    state_.stopping = true;
  }
  state_.changed.NotifyAll();
}

std::optional<Work> Dispatcher::Next(int active_samples,
                                     absl::Duration patience) {
  MutexLock lock(&state_.mu);
  const absl::Time give_up = state_.env.clock->Now() + patience;
  for (;;) {
    std::optional<Work> work = Choose(active_samples);
    if (!work || !std::holds_alternative<Idle>(*work)) return work;
    const absl::Time now = state_.env.clock->Now();
    if (now >= give_up) return work;
    const absl::Time wake = std::min({give_up, state_.scheduler.NextDeadline(),
                                      state_.scheduler.batch_window().start()});
    // Choose has removed expired work, and a batch waits only for a future
    // time. So `wake` was in the future when Choose ran, and the loop does not
    // spin.
    state_.changed.WaitFor(&state_.mu,
                           absl::ToChronoNanoseconds(
                               std::max(wake - now, absl::Microseconds(100))));
  }
}

std::optional<Work> Dispatcher::Choose(int active_samples) {
  AccountDeviceTime();
  if (state_.stopping) return std::nullopt;
  ExpireWork();
  if (std::vector<uint64_t> ids = TakeCancelled(); !ids.empty()) {
    return CancelSamples{.ids = std::move(ids)};
  }
  // Tasks run before a plan is made, because a task may delete an adapter and a
  // plan may name only adapters that exist.
  if (!state_.tasks.empty()) {
    return RunTasks{.tasks = std::exchange(state_.tasks, {})};
  }
  if (std::optional<Work> train = ChooseLater()) return train;
  if (std::optional<Work> move = ChooseMove()) return move;
  if (std::optional<Work> replay = ChooseReplay(/*idle=*/false)) return replay;
  Work work = ChoosePlan(active_samples);
  state_.env.metrics->SetQueues(state_.scheduler);
  const bool idle = std::holds_alternative<Idle>(work);
  // A batch that waits briefly for other adapters starts before the next part
  // of the replay.
  if (idle && BatchWaits()) return work;
  replayed_last_ = false;
  if (!idle) return work;
  AnswerDrainWhenIdle();
  if (std::optional<Work> replay = ChooseReplay(/*idle=*/true)) return replay;
  return work;
}

bool Dispatcher::BatchWaits() const {
  return state_.scheduler.batch_window().start() != absl::InfiniteFuture();
}

std::optional<Work> Dispatcher::ChooseReplay(bool idle) {
  const bool ends = state_.finishing && Drained();
  if (!state_.replay || (replayed_last_ && !idle) || ends) return std::nullopt;
  replayed_last_ = true;
  RunTasks run;
  run.tasks.push_back(std::exchange(state_.replay, nullptr));
  return run;
}

std::optional<Work> Dispatcher::ChooseLater() {
  while (!state_.later.empty()) {
    RunTrain train = std::move(state_.later.front());
    state_.later.pop_front();
    std::erase_if(train.slices,
                  [this](const StepSlice& slice)
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu) {
                        return !state_.steps.contains(slice.step.id);
                      });
    if (!train.slices.empty()) return train;
  }
  return std::nullopt;
}

std::optional<Work> Dispatcher::ChooseMove() {
  const auto demand_of =
      [this](AdapterKey adapter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu) {
        const AdapterRecord* record = state_.Find(adapter);
        const bool task = record != nullptr && !record->tasks.empty();
        const bool pinned = record != nullptr && record->pinned;
        return Demand{
            .busy = pinned || state_.scheduler.IsRunning(adapter),
            .ready = static_cast<WorkKinds>(
                state_.scheduler.ReadyKinds(adapter) | (task ? kTask : 0))};
      };
  const auto bytes_of = [this](AdapterKey adapter)
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu) {
                              return state_.adapters.at(adapter).image_bytes;
                            };
  const std::optional<Move> move = state_.residency.Next(demand_of, bytes_of);
  if (!move) return std::nullopt;
  if (move->ticket > 0) {
    RunTasks run;
    run.tasks.push_back(
        std::move(state_.slot_tasks.extract(move->ticket).mapped()));
    return run;
  }
  if (move->from == AdapterLocation::kDevice) {
    state_.scheduler.SetHeld(move->adapter, true);
    // If the adapter has work, that work waits from now on.
    state_.adapters.at(move->adapter).wanted_at = state_.env.clock->Now();
  }
  return RunMove{.move = *move};
}

Work Dispatcher::ChoosePlan(int active_samples) {
  running_since_ = state_.env.clock->Now();
  const Plan plan = state_.scheduler.Next(running_since_, active_samples);
  running_ = plan.kind;
  switch (plan.kind) {
    case Plan::Kind::kNone:
      break;
    case Plan::Kind::kTrain: {
      RunTrain train{.backward = plan.backward, .slices = {}};
      for (const TrainSlice& slice : plan.slices) {
        train.slices.push_back({slice, state_.StartStep(slice.work_id)});
      }
      return train;
    }
    case Plan::Kind::kExclusive:
      return RunStep{.step = state_.StartStep(plan.work_id)};
    case Plan::Kind::kDecode:
      return RunDecode{};
  }
  return Idle{};
}

void Dispatcher::AccountDeviceTime() {
  state_.scheduler.AccountDeviceTime(std::exchange(running_, Plan::Kind::kNone),
                                     state_.env.clock->Now() - running_since_);
}

void Dispatcher::ExpireWork() {
  const absl::Status late = absl::DeadlineExceededError(
      "the deadline passed while the request waited in the queue");
  for (const uint64_t id : state_.scheduler.Expired(state_.env.clock->Now())) {
    state_.Withdraw(id, late);
  }
}

std::vector<uint64_t> Dispatcher::TakeCancelled() {
  const absl::Status cancelled =
      absl::CancelledError("cancelled by the client");
  std::vector<uint64_t> running;
  for (const uint64_t id : std::exchange(state_.cancelled_samples, {})) {
    if (!state_.Withdraw(id, cancelled) && state_.samples.contains(id)) {
      running.push_back(id);
    }
  }
  return running;
}

bool Dispatcher::drained() const {
  MutexLock lock(&state_.mu);
  return Drained();
}

bool Dispatcher::Drained() const {
  // A drain does not wait for the replay, because steps that are not replayed
  // yet are still in the log. And unless the process ends, it does not wait for
  // what came after it: clients who save and read may go on for ever.
  const bool all = state_.finishing;
  return state_.draining && state_.samples.empty() &&
         !state_.residency.has_waiters() &&
         state_.holds == (all ? 0 : state_.late_holds) &&
         std::ranges::all_of(
             state_.steps,
             [&](const auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu) {
               const StepWork& work = *entry.second;
               return work.again || (work.late && !all) ||
                      (work.note &&
                       state_.scheduler.Ahead(work.adapter, work.step) > 0);
             });
}

void Dispatcher::AnswerDrainWhenIdle() {
  if (!Drained()) return;
  // Replies of steps go through post_durable too, so `done` runs after all of
  // them.
  for (Callback<bool>& done : std::exchange(state_.drain_waiters, {})) {
    state_.env.post_durable([done = std::move(done)] { done(true); });
  }
}

void Dispatcher::Close(const absl::Status& status) {
  std::vector<EngineTask> tasks;
  {
    MutexLock lock(&state_.mu);
    state_.stopping = true;
    state_.closed = status;
    for (EngineTask& task : std::exchange(state_.tasks, {})) {
      tasks.push_back(std::move(task));
    }
    if (state_.replay) tasks.push_back(std::exchange(state_.replay, nullptr));
    for (auto& [ticket, task] : std::exchange(state_.slot_tasks, {})) {
      tasks.push_back(std::move(task));
    }
    for (auto& [key, record] : state_.adapters) {
      for (EngineTask& task : std::exchange(record.tasks, {})) {
        tasks.push_back(std::move(task));
      }
    }
  }
  for (const EngineTask& task : tasks) task(status);
  MutexLock lock(&state_.mu);
  while (!state_.steps.empty()) {
    state_.Drop(state_.steps.begin()->first, status);
  }
  while (!state_.samples.empty()) {
    state_.Drop(state_.samples.begin()->first, status);
  }
  for (Callback<bool>& done : std::exchange(state_.drain_waiters, {})) {
    state_.env.post_reply([done = std::move(done), status] { done(status); });
  }
}

}  // namespace weft::dispatch
