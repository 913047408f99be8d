// Numbering of an adapter's steps: pure bookkeeping, no I/O.
//
// A step gets its number when it is submitted, so that several can be in flight
// and the server runs them in that order. A number that the server refused (the
// step was never queued) must be used by another step, or everything after it
// would wait for it: when it was the last one given out, the next step takes
// it; otherwise the later steps in flight are withdrawn. When nobody knows
// whether a step ran, the counter wants a Reset to what the server reports.
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
  kDone,     // It ran, now or earlier.
  kRefused,  // It did not run; its number is free.
  kUnknown,  // It may have run.
};

// What a training step's status says about its number. A status with the
// payload kStepDonePayload is the answer of a step that is done.
[[nodiscard]] StepOutcome OutcomeOfTrainingStep(const absl::Status& status);
inline constexpr char kStepDonePayload[] = "weft/step-done";

// Threads: any.
class StepCounter {
 public:
  explicit StepCounter(uint64_t last_step) : next_(last_step + 1) {}

  // The number that the next step will carry.
  [[nodiscard]] uint64_t next_step() const;

  // The next number. FAILED_PRECONDITION until Reset where it is not known.
  [[nodiscard]] absl::StatusOr<uint64_t> Take();

  // How to end the call that carries `number`, should it be withdrawn.
  void SetCancel(uint64_t number, std::function<void()> cancel);

  // Records the end of a step and withdraws the later ones where needed.
  // Returns what its caller is to see: `status`, or for a withdrawn step
  // FAILED_PRECONDITION with the reason.
  absl::Status Finish(uint64_t number, StepOutcome outcome,
                      const absl::Status& status);

  // FAILED_PRECONDITION while steps are in flight.
  [[nodiscard]] absl::Status CheckIdle() const;

  // Starts over after `last_step`, as the server reports it.
  void Reset(uint64_t last_step);

 private:
  struct InFlight {
    bool withdrawn = false;
    std::function<void()> cancel;
  };

  mutable absl::Mutex mu_;
  uint64_t next_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, InFlight> in_flight_ ABSL_GUARDED_BY(mu_);
  // Not empty: why numbers cannot be given out.
  std::string problem_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_STEP_COUNTER_H_
