// Keeps one adapter's steps applied exactly once: knows the numbered steps in
// flight, the latest done steps and their results. A repeated call finds its
// step here before it reaches the scheduler.
// Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_REPLAY_TABLE_H_
#define WEFT_SRC_DISPATCH_REPLAY_TABLE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/request/step.h"

namespace weft::dispatch {

// Immutable. The table and the replies that carry the result share it.
using StepResultPtr = std::shared_ptr<const StepResult>;

// An adapter keeps the results of so many latest steps.
inline constexpr size_t kReplayWindow = 64;

class ReplayTable {
 public:
  // A done step. Its digest covers the payload's type, so equal digests mean
  // the same alternative of StepResult.
  struct Done {
    std::string digest;
    StepResultPtr result;  // Null after it was dropped.
    uint64_t receipt = 0;  // Names the stored reply (stored_replies.h).
  };

  enum class Verdict { kNew, kInFlight, kReplay };
  struct Answer {
    Verdict verdict = Verdict::kNew;
    uint64_t work_id = 0;            // Set if the step is in flight.
    StepResultPtr result = nullptr;  // Set if the step is done.
  };

  // Keeps the results of the last `window` steps.
  explicit ReplayTable(size_t window = kReplayWindow) : window_(window) {}

  // Returns whether a call with this number and payload is new, in flight or
  // done. Step 0 is always new. Errors: ALREADY_EXISTS (another payload has the
  // number), OUT_OF_RANGE (the result is no longer kept).
  [[nodiscard]] absl::StatusOr<Answer> Lookup(uint64_t step,
                                              const std::string& digest) const;

  // The step was accepted. It is in flight until Complete or Fail.
  void Begin(uint64_t step, const std::string& digest, uint64_t work_id);

  // The step is done. Returns the receipts of results that leave the window.
  std::vector<uint64_t> Complete(uint64_t step, StepResultPtr result,
                                 uint64_t receipt);

  // The step did not happen. Removes it, so that a caller can send it again.
  void Fail(uint64_t step);

  // Lookup answers no step up to this one any more.
  void Forget(uint64_t step) { forgotten_ = std::max(forgotten_, step); }

  // Returns null if the step is not done or its result is no longer kept.
  [[nodiscard]] StepResultPtr ResultOf(uint64_t step) const;
  [[nodiscard]] const std::map<uint64_t, Done>& done() const { return done_; }

  // Drops the result of a done step. The step stays done.
  void DropResult(uint64_t step);

  // Returns the receipts of all results that are kept.
  [[nodiscard]] std::vector<uint64_t> Receipts() const;

 private:
  struct InFlight {
    std::string digest;
    uint64_t work_id = 0;
  };

  size_t window_;
  std::map<uint64_t, InFlight> in_flight_;
  std::map<uint64_t, Done> done_;
  uint64_t forgotten_ = 0;  // Highest step that left the window.
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_REPLAY_TABLE_H_
