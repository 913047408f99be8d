// What a start does to the dispatcher before anybody else uses it: adapters and
// steps of an earlier process are put back. And what a snapshot of the state
// reads.
// Threads: engine thread.
#ifndef WEFT_SRC_DISPATCH_RECOVERY_DESK_H_
#define WEFT_SRC_DISPATCH_RECOVERY_DESK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "src/dispatch/state.h"

namespace weft::dispatch {

struct StoredReply {
  uint64_t step = 0;
  std::string digest;
  StepResultPtr result;
};

// What the dispatcher knows of an adapter and a restart must not forget.
struct AdapterHistory {
  AdapterInfo info;
  std::vector<StoredReply> replies;  // By step; those that are kept.
  std::optional<LoadOrigin> origin;
};

class RecoveryDesk {
 public:
  explicit RecoveryDesk(State* state) : s_(*state) {}

  // Keys and epochs that were given out before are not given out again.
  void Reserve(uint64_t next_key, uint64_t last_epoch);
  [[nodiscard]] uint64_t next_key() const;
  [[nodiscard]] uint64_t last_epoch() const;

  // An adapter whose tensors are on disk, as facts.info.location says.
  void AddOnDisk(AdapterKey key, const AdapterHistory& history,
                 const AdapterFacts& facts);
  // An adapter keeps the device while it is pinned.
  void Pin(AdapterKey key, bool pinned);

  // A step that runs again. Nobody waits for it; it ends as any other.
  [[nodiscard]] StepTask BeginStep(AdapterKey key, uint64_t step,
                                   std::string digest, StepRequest request);
  // It will not end.
  void AbandonStep(uint64_t id);
  // A step that is done and does not run again.
  void AddReply(AdapterKey key, const StoredReply& reply);

  // All adapters, by key.
  [[nodiscard]] std::vector<AdapterKey> Keys() const;
  [[nodiscard]] AdapterHistory HistoryOf(AdapterKey key) const;
  // Whether a training request is between two slices. If so, none begins until
  // this was asked again and there was none.
  [[nodiscard]] bool FinishSlices();

 private:
  State& s_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_RECOVERY_DESK_H_
