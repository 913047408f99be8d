// Makes sure that each numbered step of one adapter is applied only once. The
// table knows the steps in flight, the latest completed steps and their
// results. So a repeated call does not reach the scheduler. Threads: not
// thread-safe.
#ifndef WEFT_SRC_DISPATCH_REPLAY_TABLE_H_
#define WEFT_SRC_DISPATCH_REPLAY_TABLE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "src/base/fair_eviction.h"
#include "src/request/adapter_key.h"
#include "src/request/step_task.h"

namespace weft::dispatch {

// The number of latest steps whose results an adapter keeps.
inline constexpr size_t kReplayWindow = 64;

class ReplayTable {
 public:
  // A completed step. Its digest covers the type of the request, so requests
  // with equal digests expect the same alternative of StepResult.
  struct Done {
    std::string digest;
    StepResultPtr result;  // Null after the result was dropped.
  };

  enum class Verdict { kNew, kInFlight, kReplay };
  struct Answer {
    Verdict verdict = Verdict::kNew;
    uint64_t work_id = 0;            // Set if the step is in flight.
    StepResultPtr result = nullptr;  // Set if the step is done.
  };

  // Keeps the results of the `window` highest completed steps.
  explicit ReplayTable(size_t window = kReplayWindow) : window_(window) {}

  // Returns whether a call with this number and payload is new, in flight or
  // completed. Step 0 is always new. Errors: ALREADY_EXISTS (another payload
  // has the number), OUT_OF_RANGE (completed, but the result is no longer
  // kept).
  absl::StatusOr<Answer> Lookup(uint64_t step, const std::string& digest) const;

  // Marks an accepted step as in flight until Complete or Fail. Ignores step 0.
  void Begin(uint64_t step, const std::string& digest, uint64_t work_id);

  // Marks a step in flight as completed. Returns the steps that leave the
  // window. If the step is not in flight, changes nothing and returns `step`.
  std::vector<uint64_t> Complete(uint64_t step, StepResultPtr result);

  // Removes a step that ends without a result: it was not accepted, or the
  // server stops.
  void Fail(uint64_t step);

  // Marks all steps up to this one as completed without a kept result.
  void Forget(uint64_t step) { forgotten_ = std::max(forgotten_, step); }

  // Returns the id of a step in flight; none if it is not.
  std::optional<uint64_t> WorkOf(uint64_t step) const;
  // Returns null if the step is not completed or its result is no longer kept.
  StepResultPtr ResultOf(uint64_t step) const;
  const std::map<uint64_t, Done>& done() const { return done_; }

  // Drops the result of a completed step, which stays completed.
  void DropResult(uint64_t step);

 private:
  struct InFlight {
    std::string digest;
    uint64_t work_id = 0;
  };

  size_t window_;
  std::map<uint64_t, InFlight> in_flight_;
  std::map<uint64_t, Done> done_;
  uint64_t forgotten_ = 0;  // The highest completed step without an entry.
};

// Counts the bytes of the stored replies of all adapters and finds the reply to
// drop (FairEviction). The adapters' replay tables hold the replies themselves.
// Threads: not thread-safe.
class StoredReplies {
 public:
  struct Reply {
    std::string tenant;
    AdapterKey adapter = AdapterKey::kBaseModel;
    uint64_t step = 0;
    int64_t bytes = 0;
  };

  explicit StoredReplies(int64_t max_bytes) : max_bytes_(max_bytes) {}

  void Add(const Reply& reply);
  // Removes the adapter's reply to this step, and all its replies. Do nothing
  // if there is none.
  void Remove(AdapterKey adapter, uint64_t step);
  void RemoveAll(AdapterKey adapter);

  // If the replies exceed the constructor's `max_bytes`, removes and returns
  // the oldest reply of the tenant with the most bytes; otherwise returns none.
  // The latest reply always stays, because its caller may not have received it
  // yet.
  std::optional<Reply> TakeExcess();

  int64_t bytes() const { return replies_.bytes(); }

 private:
  using Key = std::pair<AdapterKey, uint64_t>;  // An adapter and a step.

  const int64_t max_bytes_;
  FairEviction<Reply> replies_;
  std::map<Key, FairEviction<Reply>::Place> places_;
  Key latest_ = {};  // The reply that was added last.
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_REPLAY_TABLE_H_
