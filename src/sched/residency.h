// Decides which adapters are on the device if there are more adapters than
// device slots: which adapter comes in next, and which one leaves.
//
// In: waiters get slots in the order in which they asked. An adapter asks when
// it has work that could run. A new adapter has no tensors yet, so a ticket
// asks for it.
//
// Out: the least recently used adapter without work that could run. If all have
// such work, an adapter leaves only after it was served: each kind of its work,
// since it came in and since the first waiter asked. It then asks again. An
// adapter with work on the device never leaves. So every adapter that comes in
// is served, and every waiter gets a turn, even with one slot.
//
// Where to: host buffers of `host_bytes` in total. When they are full, their
// oldest adapters go to disk. Without host buffers, adapters go straight to
// disk.
//
// A deterministic state machine without clock, threads, tensors or files. The
// caller makes each move that Next returns and reports its end. Threads: not
// thread-safe; the dispatcher's lock guards it.
#ifndef WEFT_SRC_SCHED_RESIDENCY_H_
#define WEFT_SRC_SCHED_RESIDENCY_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "src/request/adapter.h"
#include "src/request/adapter_key.h"
#include "src/sched/work.h"

namespace weft::sched {

using Location = AdapterLocation;

struct ResidencyOptions {
  int max_resident = 64;    // Device slots; >= 1.
  uint64_t host_bytes = 0;  // Host memory for tensors off the device. If 0,
                            // none is used.
};

// The state of an adapter's work, which the caller knows.
struct Demand {
  bool busy = false;    // Work on the device or between slices.
  WorkKinds ready = 0;  // Kinds of waiting work that could run.
};

struct Move {
  uint64_t id = 0;      // Identifies the move in Finished.
  uint64_t ticket = 0;  // > 0: a new adapter's slot, not a move.
  AdapterKey adapter = AdapterKey::kBaseModel;
  Location from = Location::kDevice;
  Location to = Location::kDevice;
};

// An adapter or a ticket that waits for a slot.
struct SlotWaiter {
  AdapterKey adapter = AdapterKey::kBaseModel;
  uint64_t ticket = 0;
  uint64_t asked = 0;  // The count of uses when it asked.
};

class Residency {
 public:
  using DemandOf = std::function<Demand(AdapterKey adapter)>;
  // Returns the bytes of an adapter's tensors when off the device.
  using BytesOf = std::function<uint64_t(AdapterKey adapter)>;

  explicit Residency(const ResidencyOptions& options) : options_(options) {}

  // Adds a new adapter on the device. It takes over a ticket's slot.
  void Add(AdapterKey adapter);
  // Adds an adapter of an earlier process, whose tensors are on disk.
  void AddOnDisk(AdapterKey adapter);
  // Returns the slot of a ticket for which no adapter was made.
  void ReturnSlot() { --granted_; }
  // Removes an adapter, even during a move. Returns false if it is unknown.
  bool Remove(AdapterKey adapter);

  // Call it when the adapter has work. Returns true if the adapter is not on
  // the device and now asks for a slot.
  bool Want(AdapterKey adapter);
  void WantSlot(uint64_t ticket) {
    waiters_.push_back({.ticket = ticket, .asked = uses_});
  }
  // Call it when the adapter has run work of these kinds.
  void Used(AdapterKey adapter, WorkKinds kinds);

  // Returns the next move to make, or none until another call changes the
  // state. An adapter that leaves the device may not run from now on. An
  // adapter that comes in may run after Finished.
  std::optional<Move> Next(const DemandOf& demand_of, const BytesOf& bytes_of);

  // Returns whether this move of the adapter is running and the adapter exists.
  [[nodiscard]] bool IsUnderway(const Move& move) const;
  // Ends a running move (not a ticket's). After a failed move the adapter is
  // where it was. Returns the waiter, if any, that gets no slot because of the
  // failure and no longer waits.
  std::optional<SlotWaiter> Finished(const Move& move, bool ok);

  // Returns none if the adapter is unknown.
  [[nodiscard]] std::optional<Location> LocationOf(AdapterKey adapter) const;
  // Returns whether the adapter is on the device and not leaving.
  [[nodiscard]] bool CanRun(AdapterKey adapter) const;
  [[nodiscard]] bool has_waiters() const { return !waiters_.empty(); }
  // Returns the number of adapters by location. A moving one counts at its
  // origin.
  [[nodiscard]] std::array<int, kNumAdapterLocations> Counts() const {
    return counts_;
  }

 private:
  struct Entry {
    Location location = Location::kDevice;
    uint64_t move_id = 0;  // > 0 during a move.
    Location target = Location::kDevice;
    bool waits = false;    // The adapter is among waiters_.
    WorkKinds served = 0;  // Kinds of work that ran since the adapter came to
                           // the device.
    uint64_t last_use = 0;
    uint64_t bytes = 0;  // Bytes when off the device.
  };
  using Entries = std::map<AdapterKey, Entry>;

  // Returns the counter of the location.
  [[nodiscard]] int& CountAt(Location location) {
    return counts_[static_cast<size_t>(location)];
  }
  [[nodiscard]] int UsedSlots() const;
  [[nodiscard]] int LeavingDevice() const;
  // Returns whether the waiter cannot come in yet because it is still leaving.
  [[nodiscard]] bool IsLeaving(const SlotWaiter& waiter) const;
  void DropWaiter(AdapterKey adapter);
  // Removes waiters that no longer have work.
  void DropSatisfied(const DemandOf& demand_of);
  std::optional<Move> BringIn();
  std::optional<Move> MakeSlot(const DemandOf& demand_of,
                               const BytesOf& bytes_of);
  // Returns the first waiter that could come in now, or end().
  [[nodiscard]] std::deque<SlotWaiter>::iterator FirstInLine();
  // Returns the least recently used entry on the host, or end().
  [[nodiscard]] Entries::iterator OldestOnHost();
  // Picks the adapter to leave. Picks one with work only if it was used after
  // `asked`.
  [[nodiscard]] Entries::iterator PickVictim(const DemandOf& demand_of,
                                             uint64_t asked, bool* ready);
  Move StartMove(Entries::iterator it, Location to);

  const ResidencyOptions options_;
  Entries entries_;
  // Number of entries at each location.
  std::array<int, kNumAdapterLocations> counts_{};
  std::deque<SlotWaiter> waiters_;
  int granted_ = 0;  // Slots given to tickets whose adapters do not exist yet.
  uint64_t uses_ = 0;
  uint64_t moves_ = 0;
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_RESIDENCY_H_
