// Numbers an adapter's steps, without I/O.
//
// A step gets its number when it is submitted, so that several can be in flight
// and the server runs them in that order. If the server refuses a step, the
// step was never queued, and all later steps wait for its number. If the number
// was the last one, the next step takes it. Otherwise the counter withdraws the
// later steps in flight. If it is unknown whether a step ran, the counter needs
// a Reset to the server's last step.
//
// A step also carries the epoch in which its number was given out. If another
// client has loaded a checkpoint since then, the server refuses the step, and
// the counter needs a Reset.
#ifndef WEFT_CLIENT_STEP_COUNTER_H_
#define WEFT_CLIENT_STEP_COUNTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace weft::client {

enum class StepOutcome : uint8_t {
  kDone,     // The step ran, now or earlier.
  kRefused,  // The step did not run, so its number is free.
  kUnknown,  // The step may have run.
};

// Returns the outcome that a training step's status implies. If the status has
// the payload kStepDonePayload, the step ran and failed; with
// kStaleEpochPayload, its epoch had ended.
[[nodiscard]] StepOutcome OutcomeOfTrainingStep(const absl::Status& status);
inline constexpr char kStepDonePayload[] = "weft/step-done";
inline constexpr char kStaleEpochPayload[] = "weft/stale-epoch";

// A step's number and the epoch that it belongs to; 0 = any.
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

  // Takes the next number. Errors: FAILED_PRECONDITION from when the number is
  // unknown until Reset.
  [[nodiscard]] absl::StatusOr<StepNumber> Take();

  // Sets the function that cancels the call of `number` if the counter
  // withdraws it.
  void SetCancel(uint64_t number, std::function<void()> cancel);

  // Records the end of a step and withdraws later ones if needed. Returns the
  // status for the step's caller: `status`, or for a withdrawn step
  // FAILED_PRECONDITION with the reason.
  absl::Status Finish(uint64_t number, StepOutcome outcome,
                      const absl::Status& status);

  // Returns FAILED_PRECONDITION while steps are in flight.
  [[nodiscard]] absl::Status CheckIdle() const;

  // Continues after `last_step` of this epoch, which the server reported.
  void Reset(uint64_t last_step, uint64_t epoch = 0);

 private:
  struct InFlight {
    bool withdrawn = false;
    std::function<void()> cancel;
  };

  mutable absl::Mutex mu_;
  uint64_t next_ ABSL_GUARDED_BY(mu_);
  uint64_t epoch_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, InFlight> in_flight_ ABSL_GUARDED_BY(mu_);
  // If not empty, the reason why Take fails.
  std::string problem_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_STEP_COUNTER_H_
