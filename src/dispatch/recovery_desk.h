// Puts the adapters and steps of an earlier process back into the dispatcher.
// Clients may already use the adapters that are ready, and no others. Also
// returns what a snapshot of the state stores. Threads: engine thread.
#ifndef WEFT_SRC_DISPATCH_RECOVERY_DESK_H_
#define WEFT_SRC_DISPATCH_RECOVERY_DESK_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/dispatch/state.h"

namespace weft::dispatch {

struct StoredReply {
  uint64_t step = 0;
  std::string digest;
  StepResultPtr result;
};

// The part of an adapter's record that survives a restart.
struct AdapterHistory {
  AdapterInfo info;
  std::vector<StoredReply> replies;  // The stored replies, in the order of
                                     // steps.
  std::optional<LoadOrigin> origin;
};

class RecoveryDesk {
 public:
  explicit RecoveryDesk(State* state) : s_(*state) {}

  // Ensures that later keys are at least `next_key` and later epochs exceed
  // `last_epoch`.
  void Reserve(uint64_t next_key, uint64_t last_epoch);
  [[nodiscard]] uint64_t next_key() const;
  [[nodiscard]] uint64_t last_epoch() const;

  // Refuses work of these adapters, which the replay restores, until SetReady.
  // Maps ids to tenants. Call it before clients use the dispatcher.
  void SetRecovering(std::map<std::string, std::string> tenants);
  void SetReady(const std::string& adapter_id);
  // Queues the next part of the replay. The engine thread runs one such part
  // and one piece of other work in turn.
  void Post(EngineTask task);

  // Adds an adapter whose tensors are on disk, as facts.info.location says.
  void AddOnDisk(AdapterKey key, const AdapterHistory& history,
                 const AdapterFacts& facts);
  // Pins the adapter, so that it stays on the device, or unpins it.
  void Pin(AdapterKey key, bool pinned);

  // Starts a replay of the step. No caller waits for it. It ends like any other
  // step.
  [[nodiscard]] StepTask BeginStep(AdapterKey key, uint64_t step,
                                   std::string digest, StepRequest request);
  // Gives up a step that cannot complete.
  void AbandonStep(uint64_t id);
  // Adds a completed step that is not replayed.
  void AddReply(AdapterKey key, const StoredReply& reply);

  // Returns the keys of all adapters, ascending.
  [[nodiscard]] std::vector<AdapterKey> Keys() const;
  [[nodiscard]] AdapterHistory HistoryOf(AdapterKey key) const;
  // Returns whether a training request is between two slices. If so, no other
  // request starts until a later call returns false.
  [[nodiscard]] bool FinishSlices();

 private:
  State& s_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_RECOVERY_DESK_H_
