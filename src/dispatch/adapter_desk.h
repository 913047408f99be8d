// Keeps the adapters, by name and by key: which ones exist, and the facts about
// them that clients see. Also keeps the tasks that wait until an adapter is on
// the device.
#ifndef WEFT_SRC_DISPATCH_ADAPTER_DESK_H_
#define WEFT_SRC_DISPATCH_ADAPTER_DESK_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/dispatch/state.h"

namespace weft::dispatch {

class AdapterDesk {
 public:
  explicit AdapterDesk(State* state) : s_(*state) {}

  // Any thread may call the methods below.

  // Returns the adapter's facts. Errors: NOT_FOUND, also for the base model.
  absl::StatusOr<AdapterInfo> Info(const std::string& id) const;
  // Returns a page of adapters, with those that the replay of the log has yet
  // to restore. Holds the lock for a time that grows with the page, not with
  // the number of adapters.
  absl::StatusOr<AdapterPage> List(const ListAdaptersRequest& request) const;
  // Counts the adapters of all pages.
  size_t Count() const;
  // Returns the recent activity of the query's adapters and the load of its
  // tenants. Holds the lock for one adapter or tenant at a time.
  Activity Watch(const ActivityQuery& query) const;
  // Does what Engine::ReportMetrics does. Errors: NOT_FOUND.
  absl::Status Report(const MetricReport& report);
  std::optional<AdapterKey> KeyOf(const std::string& id) const;
  // Does what Engine::Ahead does.
  uint64_t Ahead(const std::string& id, uint64_t step) const;
  // Returns the adapter's id, for messages; empty if there is no such adapter.
  std::string NameOf(AdapterKey key) const;
  // Returns UNAVAILABLE, with the reason ADAPTER_RECOVERING, if the replay of
  // the log has yet to restore the adapter, or RecoveryDesk::Hold holds it.
  absl::Status CheckReady(const std::string& id) const;
  // Returns OK if the adapter may be created. Errors: ALREADY_EXISTS;
  // RESOURCE_EXHAUSTED (the server or the tenant has its maximum number of
  // adapters, or the tenant has its maximum number of bytes); UNAVAILABLE
  // (ADAPTER_RECOVERING: as CheckReady, or adapters that are not restored yet
  // decide whether there is room).
  absl::Status CheckNew(const std::string& id, const std::string& tenant) const;
  // Returns the same for adapters that are to be created together, by their
  // ids and tenants.
  absl::Status CheckNew(
      const std::map<std::string, std::string>& tenants) const;
  // Wraps `done` for a create, so that a repeated call gets the same answer. If
  // the adapter exists with the same tenant, config and durability and has run
  // no step, `done` gets its info instead of ALREADY_EXISTS.
  Callback<AdapterInfo> AnswerRepeats(const CreateAdapterRequest& request,
                                      Callback<AdapterInfo> done) const;

  // The engine thread calls the methods below.

  // Returns RESOURCE_EXHAUSTED if the adapters of the adapter's tenant, with
  // their snapshots, have all bytes that the tenant may have.
  absl::Status CheckBytes(AdapterKey key) const;
  // Returns a key that no adapter has had before.
  AdapterKey NewKey();
  // Returns a new epoch number, for a new adapter.
  uint64_t NewEpoch();
  // Adds an adapter that is on the device, in a slot that WhenSlot gave.
  // REQUIRES: CheckNew accepted the adapter after the slot was given.
  // Durability and epoch come from `facts`; if that epoch is 0, the adapter
  // gets a new one. `last_step` counts the steps of the state; the adapter's
  // own steps begin with 1.
  void Add(AdapterKey key, const std::string& id, const std::string& tenant,
           uint64_t last_step, const AdapterFacts& facts);
  // Adds the weights of a checkpoint, which are not read yet: the first sample
  // brings them to the device (SampleDesk::SubmitTo). They are no adapter that
  // a client can name or see, nor one of the tenant's. `name` is for messages.
  void AddSampler(AdapterKey key, const std::string& name,
                  const std::string& tenant, const AdapterFacts& facts);
  // Removes the adapter, if it exists. Fails its queued samples, the tasks that
  // wait for it, and its steps. A step whose last part is on the device does
  // not fail. Returns the ids of failed steps that had started.
  std::vector<uint64_t> Remove(AdapterKey key);
  // Updates the facts that clients see, if the adapter exists.
  void Publish(AdapterKey key, const AdapterFacts& facts);

  // Runs `task` when the adapter is on the device. Runs `task` at once if the
  // adapter is already there or does not exist. The task gets an error if the
  // adapter is removed or cannot be moved to the device.
  void WhenOnDevice(AdapterKey key, EngineTask task);
  // Runs `task` when a device slot for a new adapter is free. A task that gets
  // OK takes the slot with Add or gives it back with ReturnSlot.
  void WhenSlot(EngineTask task);
  // Like WhenSlot if CheckNew accepts the adapter. Otherwise runs `task` at
  // once with the error. So no adapter has to leave the device for an adapter
  // that cannot be added.
  void WhenSlotFor(const std::string& id, const std::string& tenant,
                   EngineTask task);
  void ReturnSlot();

  // Returns whether this move of the adapter is still running and the adapter
  // exists.
  bool IsUnderway(const Move& move) const;
  // Ends a move of `bytes` bytes. If the adapter is now on the device, runs the
  // tasks that waited for it. If the move failed, fails the work and the tasks
  // that get no slot because of the failure.
  void FinishMove(const Move& move, uint64_t bytes, const absl::Status& status);
  // Ends a move to the device that only time can mend. Work and tasks wait. The
  // adapter asks for a slot again, but gets none before ResumeMove.
  void PostponeMove(const Move& move);
  void ResumeMove(AdapterKey key);

 private:
  // Returns CheckNew for an adapter that comes after others, of which some are
  // of the same tenant.
  absl::Status CheckNewAfter(int before, int before_of_tenant,
                             const std::string& id,
                             const std::string& tenant) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  std::vector<EngineTask> DropWaiter(const SlotWaiter& waiter,
                                     const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);

  State& s_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_ADAPTER_DESK_H_
