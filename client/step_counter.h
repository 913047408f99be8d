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
// A step also carries the epoch of its adapter. So no step trains another
// adapter, which was made later under the same name. Only a Reset gives the
// counter the new epoch.
#ifndef WEFT_CLIENT_STEP_COUNTER_H_
#define WEFT_CLIENT_STEP_COUNTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace weft::client {

enum class StepOutcome : uint8_t {
  kDone,     // The server has accepted the step, which has its result.
  kRefused,  // The server has not accepted the step, so its number is free.
  kUnknown,  // The server may have accepted the step.
};

// Returns the outcome that a step's status implies. The payload
// kStepDonePayload means that the status is the result of an accepted step,
// kStaleEpochPayload that the adapter is gone.
StepOutcome OutcomeOfStep(const absl::Status& status);
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
  uint64_t next_step() const;

  // Takes the next number. Errors: FAILED_PRECONDITION after a step ended as
  // kUnknown, or a step other than the latest as kRefused, until a Reset.
  absl::StatusOr<StepNumber> Take();

  // Sets the function that the counter calls if it withdraws the step `number`.
  // The function cancels the step's call. If the step was already withdrawn,
  // SetCancel calls the function at once.
  void SetCancel(uint64_t number, std::function<void()> cancel);

  // Records the end of a step and withdraws later steps if this step was
  // refused. Returns the status for the step's caller: `status`, or
  // FAILED_PRECONDITION with the reason if the step was withdrawn.
  absl::Status Finish(uint64_t number, StepOutcome outcome,
                      const absl::Status& status);

  // Returns FAILED_PRECONDITION while steps are in flight.
  absl::Status CheckIdle() const;

  // Continues after `last_step` in `epoch`, both as the server reported them.
  void Reset(uint64_t last_step, uint64_t epoch = 0);

 private:
  struct InFlight {
    bool withdrawn = false;
    std::function<void()> cancel;
  };

  // Does Finish, except that it adds the functions to call to `calls`.
  absl::Status End(uint64_t number, StepOutcome outcome,
                   const absl::Status& status,
                   std::vector<std::function<void()>>* calls);

  mutable absl::Mutex mu_;
  uint64_t next_ ABSL_GUARDED_BY(mu_);
  uint64_t epoch_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, InFlight> in_flight_ ABSL_GUARDED_BY(mu_);
  // Why Take fails until a Reset; empty if Take succeeds.
  std::string problem_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_STEP_COUNTER_H_
