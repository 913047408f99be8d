// Exactly-once memory of one adapter: which numbered steps are being worked on,
// which of the latest are done and what was answered. A repeated call is found
// here before it reaches the scheduler.
// Threads: not thread-safe; a value, copied with its entries (results shared).
#ifndef WEFT_SRC_JOURNAL_REPLAY_TABLE_H_
#define WEFT_SRC_JOURNAL_REPLAY_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace weft {

class ReplayTable {
 public:
  // Shared by the table and the replies that carry it; immutable. The payload's
  // digest contains its type, so equal digests mean the same type of result.
  using Result = std::shared_ptr<const void>;

  struct Done {
    std::string digest;
    Result result;  // Null when it was lost, such as by a restart.
  };

  enum class Verdict { kNew, kInFlight, kReplay };
  struct Answer {
    Verdict verdict = Verdict::kNew;
    Result result;  // kReplay.
  };

  // Keeps the results of the last `window` steps.
  explicit ReplayTable(size_t window = 64) : window_(window) {}

  // What a call with this number and payload is; step 0 is always new. Errors:
  // ALREADY_EXISTS (another payload has the number), OUT_OF_RANGE (the step is
  // older than the window).
  [[nodiscard]] absl::StatusOr<Answer> Lookup(uint64_t step,
                                              const std::string& digest) const;

  // The step was accepted. It is in flight until one of the two below.
  void Begin(uint64_t step, const std::string& digest);

  void Complete(uint64_t step, Result result);

  // The step did not happen: forgotten, so that it can be sent again.
  void Fail(uint64_t step);

  // Adds a step that was done before this table existed.
  void Restore(uint64_t step, Done done);

  // Oldest first.
  [[nodiscard]] const std::map<uint64_t, Done>& done() const { return done_; }
  [[nodiscard]] bool HasInFlight() const { return !in_flight_.empty(); }

 private:
  size_t window_;
  std::map<uint64_t, std::string> in_flight_;  // Step, digest.
  std::map<uint64_t, Done> done_;
  uint64_t forgotten_ = 0;  // Highest step that left the window.
};

}  // namespace weft

#endif  // WEFT_SRC_JOURNAL_REPLAY_TABLE_H_
