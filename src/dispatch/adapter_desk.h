// Adapters by name and by key: which exist, their public facts, and who waits
// for room on the device.
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

  // NOT_FOUND. The base model has none.
  [[nodiscard]] absl::StatusOr<AdapterInfo> Info(const std::string& id) const;
  // Holds the lock for a page, however many adapters there are.
  [[nodiscard]] AdapterPage List(const ListAdaptersRequest& request) const;
  [[nodiscard]] size_t Count() const;
  [[nodiscard]] std::optional<AdapterKey> KeyOf(const std::string& id) const;
  // Its id, for messages; empty when it is gone.
  [[nodiscard]] std::string NameOf(AdapterKey key) const;
  // ALREADY_EXISTS, RESOURCE_EXHAUSTED (all slots, or all of the tenant, are
  // in use).
  [[nodiscard]] absl::Status CheckNew(const std::string& id,
                                      const std::string& tenant) const;

  // Engine thread.

  // A key that nothing has had before.
  [[nodiscard]] AdapterKey NewKey();
  // Names a life of an adapter that begins now.
  [[nodiscard]] uint64_t NewEpoch();
  // The adapter exists from now on, on the device, in a slot that WhenSlot
  // gave. CheckNew has passed since. Its epoch is that of the facts; 0: a new
  // one.
  void Add(AdapterKey key, const std::string& id, const std::string& tenant,
           uint64_t last_step, const AdapterFacts& facts);
  // The load that the adapter's epoch began with (StepDesk::CompleteLoad tells
  // for itself).
  void SetOrigin(AdapterKey key, LoadOrigin origin);
  // Fails the adapter's work and those who wait for it, but for work that the
  // device has in its last slice. Returns the ids of failed work that had
  // started. A later adapter of the same id is another one.
  std::vector<uint64_t> Remove(AdapterKey key);
  // Renews the public facts, if the adapter exists.
  void Publish(AdapterKey key, const AdapterFacts& facts);

  // Runs `task` once the adapter is on the device: at once if it is, or if it
  // does not exist.
  void WhenOnDevice(AdapterKey key, EngineTask task);
  // Runs `task` once there is a slot for a new adapter, for Add or ReturnSlot.
  void WhenSlot(EngineTask task);
  void ReturnSlot();

  // The adapter makes this move still: it was not removed meanwhile.
  [[nodiscard]] bool IsUnderway(const sched::Move& move) const;
  // Ends a move of so many bytes. Runs the tasks that waited for the adapter,
  // or fails those whom the failed move leaves without room.
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
