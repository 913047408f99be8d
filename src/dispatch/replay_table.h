// Exactly-once memory of one adapter: which numbered steps are being worked on,
// which of the latest are done and what was answered. A repeated call is found
// here before it reaches the scheduler.
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

// Shared by the table and the replies that carry it; immutable.
using StepResultPtr = std::shared_ptr<const StepResult>;

class ReplayTable {
 public:
  // A done step. The digest contains the payload's type, so equal digests mean
  // the same alternative of StepResult.
  struct Done {
    std::string digest;
    StepResultPtr result;  // Null once it was dropped.
    uint64_t receipt = 0;  // Names the stored reply (stored_replies.h).
  };

  enum class Verdict { kNew, kInFlight, kReplay };
  struct Answer {
    Verdict verdict = Verdict::kNew;
    uint64_t work_id = 0;            // When the step is in flight.
    StepResultPtr result = nullptr;  // When the step is done.
  };

  // Keeps the results of the last `window` steps.
  explicit ReplayTable(size_t window = 64) : window_(window) {}

  // What a call with this number and payload is; step 0 is always new. Errors:
  // ALREADY_EXISTS (another payload has the number), OUT_OF_RANGE (the result
  // is no longer kept).
  [[nodiscard]] absl::StatusOr<Answer> Lookup(uint64_t step,
                                              const std::string& digest) const;

  // The step was accepted. It is in flight until one of the two below.
  void Begin(uint64_t step, const std::string& digest, uint64_t work_id);

  // Returns the receipts of results that left the window for this one.
  std::vector<uint64_t> Complete(uint64_t step, StepResultPtr result,
                                 uint64_t receipt);

  // The step did not happen: forgotten, so that it can be sent again.
  void Fail(uint64_t step);

  // No step up to this one is answered any more.
  void Forget(uint64_t step) { forgotten_ = std::max(forgotten_, step); }

  // Null: not done, or no longer kept.
  [[nodiscard]] StepResultPtr ResultOf(uint64_t step) const;
  [[nodiscard]] const std::map<uint64_t, Done>& done() const { return done_; }

  // Forgets the result of a done step, not that it was done.
  void DropResult(uint64_t step);

  // The receipts of all results that are kept.
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
