// Adapters by name and by key: which ones exist, their public facts, and the
// tasks that wait until an adapter is on the device.
#ifndef WEFT_SRC_DISPATCH_ADAPTER_DESK_H_
#define WEFT_SRC_DISPATCH_ADAPTER_DESK_H_

#include <cstddef>
#include <cstdint>
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

  // Errors: NOT_FOUND, also for the base model, which has no info.
  [[nodiscard]] absl::StatusOr<AdapterInfo> Info(const std::string& id) const;
  // Holds the lock for a time that grows with the page, not with the number of
  // adapters. Errors: UNAVAILABLE (as CheckReady, for one of the page).
  [[nodiscard]] absl::StatusOr<AdapterPage> List(
      const ListAdaptersRequest& request) const;
  [[nodiscard]] size_t Count() const;
  // Holds the lock for one adapter or tenant at a time.
  [[nodiscard]] Activity Watch(const ActivityQuery& query) const;
  [[nodiscard]] std::optional<AdapterKey> KeyOf(const std::string& id) const;
  // Returns the adapter's id, for messages; empty if the adapter no longer
  // exists.
  [[nodiscard]] std::string NameOf(AdapterKey key) const;
  // Returns whether a start has restored the adapter. Errors: UNAVAILABLE, with
  // the reason ADAPTER_RECOVERING.
  [[nodiscard]] absl::Status CheckReady(const std::string& id) const;
  // Returns whether an adapter may be created. Errors: ALREADY_EXISTS;
  // RESOURCE_EXHAUSTED (no slot is left, or the tenant has reached its limit of
  // slots or bytes), UNAVAILABLE (as CheckReady, for the last slots).
  [[nodiscard]] absl::Status CheckNew(const std::string& id,
                                      const std::string& tenant) const;
  // Wraps `done` for a create, so that a repeated call gets the same answer. If
  // the adapter exists with the same tenant and config and was never trained,
  // `done` gets its info instead of ALREADY_EXISTS.
  [[nodiscard]] Callback<AdapterInfo> AnswerRepeats(
      const CreateAdapterRequest& request, Callback<AdapterInfo> done) const;

  // The engine thread calls the methods below.

  // Returns a key that no adapter has had before.
  [[nodiscard]] AdapterKey NewKey();
  // Returns a new epoch for an adapter whose state begins now.
  [[nodiscard]] uint64_t NewEpoch();
  // Adds an adapter that is on the device, in a slot that WhenSlot gave. The
  // caller has called CheckNew since it got the slot. Durability and epoch come
  // from the facts; if the epoch is 0, the adapter gets a new one. Steps up to
  // `last_step` are durable, because they are those of a checkpoint.
  void Add(AdapterKey key, const std::string& id, const std::string& tenant,
           uint64_t last_step, const AdapterFacts& facts);
  // Sets the load that began the adapter's epoch. StepDesk::CompleteLoad does
  // this for its own loads.
  void SetOrigin(AdapterKey key, LoadOrigin origin);
  // Removes the adapter. Fails its work and the tasks that wait for it, except
  // work whose last slice is running. Returns the ids of failed work that had
  // started. A later adapter with the same id gets another key.
  std::vector<uint64_t> Remove(AdapterKey key);
  // Updates the public facts if the adapter exists.
  void Publish(AdapterKey key, const AdapterFacts& facts);

  // Runs `task` when the adapter is on the device. Runs it at once if the
  // adapter is already there or does not exist.
  void WhenOnDevice(AdapterKey key, EngineTask task);
  // Runs `task` when a new adapter has a slot. The task calls Add or
  // ReturnSlot.
  void WhenSlot(EngineTask task);
  // Like WhenSlot if CheckNew accepts the adapter. Otherwise runs `task` at
  // once with the error. So no adapter has to leave the device for one that
  // cannot be added.
  void WhenSlotFor(const std::string& id, const std::string& tenant,
                   EngineTask task);
  void ReturnSlot();

  // Returns whether this move of the adapter is still running and the adapter
  // exists.
  [[nodiscard]] bool IsUnderway(const sched::Move& move) const;
  // Ends a move and runs the tasks that waited for the adapter. If the move
  // failed, fails the work and the tasks that cannot get a slot without it.
  void FinishMove(const sched::Move& move, uint64_t bytes,
                  const absl::Status& status);

 private:
  [[nodiscard]] std::vector<EngineTask> DropWaiter(
      const sched::SlotWaiter& waiter, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);

  State& s_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_ADAPTER_DESK_H_
