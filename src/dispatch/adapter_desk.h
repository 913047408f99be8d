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

  // Any thread.

  // Errors: NOT_FOUND, also for the base model, which has no info.
  [[nodiscard]] absl::StatusOr<AdapterInfo> Info(const std::string& id) const;
  // The time under the lock grows with the page, not with all adapters.
  [[nodiscard]] AdapterPage List(const ListAdaptersRequest& request) const;
  [[nodiscard]] size_t Count() const;
  [[nodiscard]] std::optional<AdapterKey> KeyOf(const std::string& id) const;
  // Returns the adapter's id, for messages; empty when the adapter is gone.
  [[nodiscard]] std::string NameOf(AdapterKey key) const;
  // Errors: ALREADY_EXISTS, RESOURCE_EXHAUSTED (all slots, or all of the
  // tenant's, are in use; the tenant's adapters hold all its bytes).
  [[nodiscard]] absl::Status CheckNew(const std::string& id,
                                      const std::string& tenant) const;
  // Returns a callback for the result of a create: if the adapter exists, has
  // this tenant and this config and was never trained, `done` gets its info
  // instead of ALREADY_EXISTS. So a repeated call gets the same answer.
  [[nodiscard]] Callback<AdapterInfo> AnswerRepeats(
      const CreateAdapterRequest& request, Callback<AdapterInfo> done) const;

  // Engine thread.

  // Returns a key that no adapter has had before.
  [[nodiscard]] AdapterKey NewKey();
  // Returns a new epoch, for an adapter whose state begins now.
  [[nodiscard]] uint64_t NewEpoch();
  // Adds an adapter that is on the device, in a slot that WhenSlot gave. The
  // caller called CheckNew after it got the slot. The epoch is that of the
  // facts; 0: a new one.
  void Add(AdapterKey key, const std::string& id, const std::string& tenant,
           uint64_t last_step, const AdapterFacts& facts);
  // Sets the load that the adapter's epoch began with. StepDesk::CompleteLoad
  // sets it itself.
  void SetOrigin(AdapterKey key, LoadOrigin origin);
  // Removes the adapter. Fails its work and the tasks that wait for it, except
  // work whose last slice is on the device. Returns the ids of failed work that
  // had started. A later adapter of the same id gets another key.
  std::vector<uint64_t> Remove(AdapterKey key);
  // Updates the public facts if the adapter exists.
  void Publish(AdapterKey key, const AdapterFacts& facts);

  // Runs `task` when the adapter is on the device. Runs it at once if the
  // adapter is there or does not exist.
  void WhenOnDevice(AdapterKey key, EngineTask task);
  // Runs `task` when a new adapter has a slot. The task calls Add or
  // ReturnSlot.
  void WhenSlot(EngineTask task);
  // The same if CheckNew accepts the adapter. Otherwise runs `task` at once
  // with its error, so that no adapter leaves for one that cannot be added.
  void WhenSlotFor(const std::string& id, const std::string& tenant,
                   EngineTask task);
  void ReturnSlot();

  // Returns whether the adapter still makes this move and was not removed.
  [[nodiscard]] bool IsUnderway(const sched::Move& move) const;
  // Ends a move. Runs the tasks that waited for the adapter. If the move
  // failed, fails the work and the tasks that get no slot because of it.
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
