// The dispatcher connects the threads that bring requests with the engine
// thread, which computes. It uses no tensor and starts no thread. One lock
// guards its state.
//
//   any thread                         engine thread
//   steps().Submit(...)                while (auto work = Next(...)) { run it;
//   samples().Submit(...)                steps().Complete(id, result);
//   Post(task)                         }
//
// It is a deterministic state machine: the result of Next depends only on the
// earlier calls and on Environment::clock.
#ifndef WEFT_SRC_DISPATCH_DISPATCHER_H_
#define WEFT_SRC_DISPATCH_DISPATCHER_H_

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/dispatch/adapter_desk.h"
#include "src/dispatch/recovery_desk.h"
#include "src/dispatch/sample_desk.h"
#include "src/dispatch/state.h"
#include "src/dispatch/step_desk.h"
#include "src/dispatch/work.h"

namespace weft::dispatch {

class Dispatcher {
 public:
  Dispatcher(const Options& options, Environment environment);
  // REQUIRES: Next is not running and all holds are released.
  ~Dispatcher() = default;
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  StepDesk& steps() { return steps_; }
  SampleDesk& samples() { return samples_; }
  AdapterDesk& adapters() { return adapters_; }
  const AdapterDesk& adapters() const { return adapters_; }
  RecoveryDesk& recovery() { return recovery_; }

  // Any thread may call the methods below.

  // Queues a task, which the engine thread runs before its next micro-batch,
  // step or decode iteration. If Close runs before the task, the task gets
  // Close's error instead.
  void Post(EngineTask task);
  // Returns UNAVAILABLE after Drain, Stop or Close.
  absl::Status CheckOpen() const;
  // Refuses new work from now on, except saves that can run at once. Runs
  // `done` when all accepted work is done, or with Close's error if Close comes
  // first, or with ABORTED if Undrain does.
  void Drain(Callback<bool> done);
  // Does what Drain does for a process that ends: also refuses saves, and waits
  // for all that Drain let through. Undrain must not follow.
  void Finish(Callback<bool> done);
  // Takes new work again.
  void Undrain();
  // Returns a pointer that delays the end of a drain until its last copy is
  // destroyed. Work on other threads holds a copy.
  [[nodiscard]] std::shared_ptr<void> Hold();
  // From now on, Next returns nullopt.
  void Stop();
  // Returns whether a drain has ended: no new work is accepted, and all
  // accepted work has ended. Parts of the replay of the log may be left.
  bool drained() const;

  // The engine thread calls the methods below.

  // Returns the next work. Waits at most `patience` for it, then returns Idle.
  // Returns none after Stop. `active_samples` is the number of samples in
  // prefill or decode. If the previous call returned a micro-batch, step or
  // decode iteration, the time since then counts as the device time of that
  // previous work.
  std::optional<Work> Next(int active_samples, absl::Duration patience);
  // Fails all work that has not ended, all queued tasks, and every task that is
  // posted later. Call it after the last Next.
  void Close(const absl::Status& status);

 private:
  std::optional<Work> Choose(int active_samples)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  std::optional<Work> ChooseLater() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  std::optional<Work> ChooseMove() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // Returns the next part of the replay of the log. Returns none if no part is
  // queued, if a drain has ended, or if it is other work's turn. `idle` means
  // that there is no other work.
  std::optional<Work> ChooseReplay(bool idle)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  Work ChoosePlan(int active_samples) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // Returns whether a batch waits for other adapters (BatchWindow).
  bool BatchWaits() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void ExpireWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  std::vector<uint64_t> TakeCancelled()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void AccountDeviceTime() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void AnswerDrainWhenIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // Returns what drained() returns. Any thread may call it.
  bool Drained() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);

  mutable State state_;
  StepDesk steps_;
  SampleDesk samples_;
  AdapterDesk adapters_;
  RecoveryDesk recovery_;
  // The kind of the plan that runs on the device, and the plan's start.
  Plan::Kind running_ ABSL_GUARDED_BY(state_.mu) = Plan::Kind::kNone;
  absl::Time running_since_ ABSL_GUARDED_BY(state_.mu);
  // True if the replay had the latest turn. The next turn then goes to other
  // work.
  bool replayed_last_ ABSL_GUARDED_BY(state_.mu) = false;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_DISPATCHER_H_
