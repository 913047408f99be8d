// Numbers an adapter's steps, without I/O.
//
// A step gets its number when it is submitted. So several steps can be in
// flight, and the server runs them in the order of their numbers. A step that
// the server has accepted keeps its number, also if it fails. If the server
// does not accept a step, the next step takes its number. But if later steps
// are in flight, which the server cannot run, the counter withdraws them, and
// needs a Reset to the server's next number. The counter also needs a Reset if
// it is unknown whether the server has accepted a step.
//
// If the server has no room for a step, the counter holds the adapter's steps
// back. They go out again in order, at most as many at a time as the server had
// room for. Each answer lets the next ones go, and the bound rises slowly. If
// there is no answer to wait for, the lowest step goes when the server's hint
// has passed. Without this order, later steps would take the room that the
// lowest one needs.
//
// A step also carries the epoch of its adapter. So no step trains another
// adapter, which was made later under the same name. Only a Reset gives the
// counter the new epoch.
#ifndef WEFT_CLIENT_STEP_COUNTER_H_
#define WEFT_CLIENT_STEP_COUNTER_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace weft::client {

enum class StepOutcome : uint8_t {
  kDone,     // The server has accepted the step, which has its result.
  kRefused,  // The server has not accepted the step, so its number is free.
  kUnknown,  // The server may have accepted the step.
};

// Returns the outcome that a step's status implies. The payload
// kStepDonePayload means that the status is the result of an accepted step,
// kStaleEpochPayload that the adapter is gone.
[[nodiscard]] StepOutcome OutcomeOfStep(const absl::Status& status);
inline constexpr char kStepDonePayload[] = "weft/step-done";
inline constexpr char kStaleEpochPayload[] = "weft/stale-epoch";

// A step's number and the epoch that it belongs to. Epoch 0: any epoch.
struct StepNumber {
  uint64_t step = 0;
  uint64_t epoch = 0;
};

// Threads: any.
class StepCounter {
 public:
  explicit StepCounter(uint64_t last_step, uint64_t epoch = 0)
      : next_(last_step + 1), epoch_(epoch) {}

  // Returns the number of the next step.
  [[nodiscard]] uint64_t next_step() const;

  // Takes the next number. Errors: FAILED_PRECONDITION after a step ended as
  // kUnknown, or a step other than the latest as kRefused, until a Reset.
  [[nodiscard]] absl::StatusOr<StepNumber> Take();

  // Sets the function that the counter calls if it withdraws the step `number`.
  // The function cancels the step's call. If the step was already withdrawn,
  // SetCancel calls the function at once.
  void SetCancel(uint64_t number, std::function<void()> cancel);

  // Sets the function that the counter calls if it may be the turn of the step
  // `number`. The function makes the step's call ask again (TurnOf).
  void SetWake(uint64_t number, std::function<void()> wake);

  // Returns InfinitePast if the step may be sent. Then it counts as sent.
  // Otherwise returns when to ask again: when the server's hint has passed, or
  // at the deadline if the step waits for others. After the deadline, returns
  // why the step must wait.
  absl::StatusOr<absl::Time> TurnOf(uint64_t number, absl::Time deadline);

  // Records that the server has no room for the step, for the reason `refusal`.
  // From now on steps wait for their turn. No step is sent before `retry_at`,
  // unless a step is done before, or was done after the refused one was sent:
  // then there may be room.
  void HoldBack(uint64_t number, const absl::Status& refusal,
                absl::Time retry_at);

  // Records the end of a step and withdraws later steps if this step was
  // refused. Returns the status for the step's caller: `status`, or
  // FAILED_PRECONDITION with the reason if the step was withdrawn.
  absl::Status Finish(uint64_t number, StepOutcome outcome,
                      const absl::Status& status);

  // Returns FAILED_PRECONDITION while steps are in flight.
  [[nodiscard]] absl::Status CheckIdle() const;

  // Continues after `last_step` in `epoch`, both as the server reported them.
  void Reset(uint64_t last_step, uint64_t epoch = 0);

 private:
  static constexpr double kNoLimit = std::numeric_limits<double>::infinity();

  struct InFlight {
    bool withdrawn = false;
    std::function<void()> cancel;
    bool sent = false;     // Sent, and not refused for lack of room since.
    uint64_t answers = 0;  // answers_ when the step was sent.
    std::function<void()> wake;
  };

  // Does Finish, except that it adds the functions to call to `calls`.
  absl::Status End(uint64_t number, StepOutcome outcome,
                   const absl::Status& status,
                   std::vector<std::function<void()>>* calls);
  // Updates the bound when a step has ended. Returns the functions that wake
  // the steps whose turn it may be.
  std::vector<std::function<void()>> NextTurns(StepOutcome outcome)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;
  uint64_t next_ ABSL_GUARDED_BY(mu_);
  uint64_t epoch_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, InFlight> in_flight_ ABSL_GUARDED_BY(mu_);
  // If not OK, only the first limit_ steps in flight may be at the server, and
  // no step may be sent before retry_at_.
  absl::Status refusal_ ABSL_GUARDED_BY(mu_);
  double limit_ ABSL_GUARDED_BY(mu_) = kNoLimit;
  absl::Time retry_at_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  uint64_t answers_ ABSL_GUARDED_BY(mu_) = 0;  // Number of steps that are done.
  // Why Take fails until a Reset; empty if Take succeeds.
  std::string problem_ ABSL_GUARDED_BY(mu_);
};

// The place of a step's call in the order of its adapter's steps.
struct StepPlace {
  std::shared_ptr<StepCounter> counter;  // Null: the call is not a step.
  uint64_t number = 0;
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_STEP_COUNTER_H_
