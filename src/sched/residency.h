// Decides which adapters have their tensors on the device if there are more
// adapters than device slots: which adapter comes in next, and which leaves.
//
// In: waiters get slots in the order in which they asked. An adapter asks when
// it has work that could run. A new adapter asks by a ticket, because it has no
// tensors yet.
//
// Out: the least recently used adapter without work that could run. If all have
// such work, the least recently used one that was served, with each kind of
// work it has, since it came in and since the first waiter asked. It then asks
// again. An adapter with work on the device never leaves. So every adapter that
// comes in is served, each leaving adapter makes room for another one, and
// every waiter gets a turn, even with one slot.
//
// Where to: to host buffers of `host_bytes` in total. When they are full, their
// oldest adapters go to disk. Without host buffers adapters go straight to
// disk.
//
// A deterministic state machine: no clock, no threads, no memory or files of
// its own. The caller makes each move that Next returns and reports its end.
// Threads: not thread-safe; the dispatcher's lock guards it.
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
  uint64_t host_bytes = 0;  // For tensors off the device; 0: none.
};

// The work of an adapter that may have to move; the caller knows it.
struct Demand {
  bool busy = false;    // Work on the device or between slices.
  WorkKinds ready = 0;  // Kinds of its waiting work that could run.
};

struct Move {
  uint64_t id = 0;      // Identifies the move in Finished.
  uint64_t ticket = 0;  // > 0: slot of a new adapter; no move.
  AdapterKey adapter = AdapterKey::kBaseModel;
  Location from = Location::kDevice;
  Location to = Location::kDevice;
};

// An adapter or a ticket that waits for a slot.
struct SlotWaiter {
  AdapterKey adapter = AdapterKey::kBaseModel;
  uint64_t ticket = 0;
  uint64_t asked = 0;  // The count of uses at that time.
};

class Residency {
 public:
  using DemandOf = std::function<Demand(AdapterKey adapter)>;
  // Returns the bytes of an adapter's tensors off the device.
  using BytesOf = std::function<uint64_t(AdapterKey adapter)>;

  explicit Residency(const ResidencyOptions& options) : options_(options) {}

  // Adds a new adapter on the device. It takes over the slot of a ticket.
  void Add(AdapterKey adapter);
  // Adds an adapter of an earlier process. Its tensors are on disk.
  void AddOnDisk(AdapterKey adapter);
  // Returns a ticket's slot in which no adapter was made.
  void ReturnSlot() { --granted_; }
  // Removes an adapter, also while it moves. Returns false if it is unknown.
  bool Remove(AdapterKey adapter);

  // The adapter has work. Returns true if it is not on the device and now asks
  // for a slot.
  bool Want(AdapterKey adapter);
  void WantSlot(uint64_t ticket) {
    waiters_.push_back({.ticket = ticket, .asked = uses_});
  }
  // The adapter ran work of these kinds.
  void Used(AdapterKey adapter, WorkKinds kinds);

  // Returns the next move to make, or none until another call changes the
  // state. An adapter that leaves the device may not run from now on. An
  // adapter that comes in may run after Finished.
  std::optional<Move> Next(const DemandOf& demand_of, const BytesOf& bytes_of);

  // Returns whether the adapter still makes this move and was not removed.
  [[nodiscard]] bool IsUnderway(const Move& move) const;
  // Ends a move that is under way (not a ticket's). A failed move leaves the
  // adapter where it was. Returns the waiter that gets no slot because of the
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
    uint64_t move_id = 0;  // > 0: it moves.
    Location target = Location::kDevice;
    bool waits = false;    // Is among waiters_.
    WorkKinds served = 0;  // Since it came in.
    uint64_t last_use = 0;
    uint64_t bytes = 0;  // Off the device.
  };
  using Entries = std::map<AdapterKey, Entry>;

  // Returns the number of entries at the location.
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
  // Returns the first waiter that could come in now; end(): none.
  [[nodiscard]] std::deque<SlotWaiter>::iterator FirstInLine();
  // The least recently used entry on the host; end(): none.
  [[nodiscard]] Entries::iterator OldestOnHost();
  // Picks an adapter with work only if it was used after `asked`.
  [[nodiscard]] Entries::iterator PickVictim(const DemandOf& demand_of,
                                             uint64_t asked, bool* ready);
  Move StartMove(Entries::iterator it, Location to);

  const ResidencyOptions options_;
  Entries entries_;
  std::array<int, kNumAdapterLocations> counts_{};  // Entries by location.
  std::deque<SlotWaiter> waiters_;
  int granted_ = 0;  // Slots given to tickets and not taken over yet.
  uint64_t uses_ = 0;
  uint64_t moves_ = 0;
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_RESIDENCY_H_
