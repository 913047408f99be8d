// The dispatcher: between the threads that bring requests and the one thread
// that computes. It owns the lock, knows no tensor and has no thread.
//
//   any thread                         engine thread
//   steps().Submit(...)                while (auto work = Next(...)) { run it;
//   samples().Submit(...)                steps().Complete(id, result);
//   Post(task)                         }
//
// A deterministic state machine: the calls before Next, and the clock that the
// caller passes in, determine what Next returns.
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

  [[nodiscard]] StepDesk& steps() { return steps_; }
  [[nodiscard]] SampleDesk& samples() { return samples_; }
  [[nodiscard]] AdapterDesk& adapters() { return adapters_; }
  [[nodiscard]] const AdapterDesk& adapters() const { return adapters_; }
  [[nodiscard]] RecoveryDesk& recovery() { return recovery_; }

  // Any thread.

  // Queues a task that the engine thread runs before its next plan. After Close
  // the task runs in the caller, with Close's error.
  void Post(EngineTask task);
  // Returns UNAVAILABLE when draining.
  [[nodiscard]] absl::Status CheckOpen() const;
  // Refuses new work from now on; `done` runs when all accepted work is done.
  void Drain(Callback<bool> done);
  // For work on other threads: a drain waits until the last copy is gone.
  [[nodiscard]] std::shared_ptr<void> Hold();
  // Next returns nothing from now on.
  void Stop();
  // Whether a drain has ended: no work is left, and none is taken in.
  [[nodiscard]] bool drained() const;

  // Engine thread.

  // Returns the next work. Waits for it at most `patience`, then returns Idle.
  // Returns none when stopped. `active_samples`: samples that are being
  // prefilled or decoded. The time since the last call counts as device time of
  // the work that it returned.
  [[nodiscard]] std::optional<Work> Next(int active_samples,
                                         absl::Duration patience);
  // Call after the last Next. Fails all that waits, and all that comes later.
  void Close(const absl::Status& status);

 private:
  [[nodiscard]] std::optional<Work> Choose(int active_samples)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  [[nodiscard]] std::optional<Work> ChooseMove()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  [[nodiscard]] Work ChoosePlan(int active_samples)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void ExpireWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  [[nodiscard]] std::vector<uint64_t> TakeCancelled()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void AccountDeviceTime() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void AnswerDrainWhenIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  [[nodiscard]] bool Drained() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);

  mutable State state_;
  StepDesk steps_;
  SampleDesk samples_;
  AdapterDesk adapters_;
  RecoveryDesk recovery_;
  // The plan that runs on the device, and its start.
  sched::Plan::Kind running_ ABSL_GUARDED_BY(state_.mu) =
      sched::Plan::Kind::kNone;
  absl::Time running_since_ ABSL_GUARDED_BY(state_.mu);
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_DISPATCHER_H_
