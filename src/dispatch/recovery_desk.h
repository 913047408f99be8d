// Puts the adapters and steps of an earlier process back into the dispatcher.
// Also returns what a snapshot of the state stores. Threads: engine thread.
#ifndef WEFT_SRC_DISPATCH_RECOVERY_DESK_H_
#define WEFT_SRC_DISPATCH_RECOVERY_DESK_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/dispatch/state.h"

namespace weft::dispatch {

// The part of the dispatcher's AdapterRecord (entries.h) that survives a
// restart.
struct AdapterHistory {
  AdapterInfo info;
  std::vector<StoredReply> replies;  // In the order of steps.
};

class RecoveryDesk {
 public:
  explicit RecoveryDesk(State* state) : s_(*state) {}

  // Ensures that later keys are at least `next_key`, later epochs exceed
  // `last_epoch`, and the ids of later steps are at least `next_work`.
  void Reserve(uint64_t next_key, uint64_t last_epoch, uint64_t next_work);
  uint64_t next_key() const;
  uint64_t last_epoch() const;

  // Names the adapters that the replay of the log restores, as a map of ids to
  // tenants. AdapterDesk::CheckReady refuses such an adapter until SetReady.
  // Call it before clients use the dispatcher.
  void SetRecovering(std::map<std::string, std::string> tenants);
  void SetReady(const std::string& adapter_id);
  // Does the same for a unit (src/request/move_unit.h) that begins its way to
  // or from another log, with these adapters, until Release. Steps of them, or
  // that they teach, end with the error of CheckReady if they wait for missing
  // numbers and are not kept. Errors, with which nothing is held: UNAVAILABLE
  // while a kept step waits for missing numbers; those with which the steps of
  // an adapter end until a restart.
  absl::Status Hold(const std::string& unit,
                    const std::map<std::string, std::string>& tenants);
  void Release(const std::string& unit);
  // Returns the unit's adapters that exist, and what AdapterInfo says of them.
  std::map<AdapterKey, AdapterInfo> AdaptersOf(const std::string& unit) const;
  // Returns whether nothing more of the unit is to be done: no step, which may
  // also be one that its adapters teach, no sample and no task.
  bool IsQuiet(const std::string& unit) const;
  // Ends the queued samples of the unit with the error of CheckReady. Returns
  // the ids of those that run.
  std::vector<uint64_t> DropSamples(const std::string& unit);
  // Shows how long the replay will take, as estimated.
  void SetTimeLeft(absl::Duration left);
  // Queues the next part of the replay. If there is other work, the engine
  // thread alternates between parts of the replay and pieces of other work.
  void Post(EngineTask task);

  // Adds an adapter whose tensors are on disk, as facts.info.location says.
  void AddOnDisk(AdapterKey key, const AdapterHistory& history,
                 const AdapterFacts& facts);
  // Pins the adapter, so that it stays on the device, or unpins it.
  void Pin(AdapterKey key, bool pinned);

  // Starts a replay of the step, for which no caller waits. The step ends as
  // other steps do (StepDesk), or with AbandonStep.
  StepTask BeginStep(AdapterKey key, uint64_t step, std::string digest,
                     StepRequest request);
  // Removes a replayed step that cannot complete.
  void AbandonStep(uint64_t id);
  // Adds a completed step with its stored reply, without a replay of the step.
  // Does nothing for step 0 or if there is no such adapter.
  void AddReply(AdapterKey key, const StoredReply& reply);

  // Queues a kept step of an earlier process, under the id that it had.
  // `item` is that of StepDesk::Submit.
  void Resume(AdapterKey key, uint64_t id, std::string digest,
              StepRequest request, std::string note, WorkItem item);

  // Returns the kept steps that the log has and that have not ended.
  std::vector<AcceptedStep> Kept() const;
  // Returns the keys of all adapters, ascending.
  std::vector<AdapterKey> Keys() const;
  AdapterHistory HistoryOf(AdapterKey key) const;
  // If `wanted`, returns whether no training request is between two slices. As
  // long as one is, no other request starts that would be divided, until a
  // later call. Returns false if not `wanted`.
  [[nodiscard]] bool FinishSlices(bool wanted);

 private:
  // Returns whether the unit has the adapter.
  bool IsIn(const std::string& unit, AdapterKey key) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  // Returns whether the step is one of the unit's, or one that it teaches.
  bool Needs(const StepWork& work, const std::string& unit) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  void Store(AdapterRecord& record, AdapterKey key, const StoredReply& reply)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);

  State& s_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_RECOVERY_DESK_H_
