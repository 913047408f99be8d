// Decides which adapters have their tensors on the device, if there are more
// adapters than device slots, or if they hold more than `device_bytes`.
//
// Which adapter comes in: slots are given in the order in which they were asked
// for. An adapter asks when it has work. A new adapter does not exist yet, so
// the caller asks for its slot with a number, its ticket (WantSlot).
//
// Which adapter leaves: the least recently used one without work that could
// run. If all adapters have such work, the least recently used one that was
// served leaves and asks again. An adapter was served if each kind of its ready
// work ran since it came in, and if it was used since the first waiter asked. A
// busy adapter (Demand::busy) never leaves. So an adapter with work is served
// before it leaves, and waiters get their turns even with one slot.
//
// Where the adapter goes: to host memory, which has room for `host_bytes`. If
// host memory is full, its least recently used adapters go to disk first. If no
// room can be made, the adapter goes straight to disk.
//
// A deterministic state machine without clock, threads, tensors or files. The
// caller makes each move that Next returns and reports its end. Threads: not
// thread-safe; the dispatcher's lock guards it.
#ifndef WEFT_SRC_DISPATCH_RESIDENCY_H_
#define WEFT_SRC_DISPATCH_RESIDENCY_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>

#include "src/dispatch/scheduled_work.h"
#include "src/request/adapter.h"
#include "src/request/adapter_key.h"

namespace weft::dispatch {

using Location = AdapterLocation;

struct ResidencyOptions {
  int max_resident = 0;     // Device slots; >= 1.
  uint64_t host_bytes = 0;  // Host memory for adapters; 0: none is used.
  // When adapters on the device hold at least so much, none comes in until one
  // has left. 0: no limit.
  uint64_t device_bytes = 0;
};

// The state of an adapter's work, which the caller knows.
struct Demand {
  // The adapter must not leave the device now; or, if it is not there, it is
  // pinned, and comes in to stay.
  bool busy = false;
  WorkKinds ready = 0;  // Kinds of waiting work that could run.
};

struct Move {
  uint64_t id = 0;      // Identifies the move; 0 if `ticket` > 0.
  uint64_t ticket = 0;  // > 0: this ticket gets a slot, nothing moves.
  AdapterKey adapter = AdapterKey::kBaseModel;
  Location from = Location::kDevice;
  Location to = Location::kDevice;
};

// An adapter or a ticket that waits for a slot.
struct SlotWaiter {
  AdapterKey adapter = AdapterKey::kBaseModel;
  uint64_t ticket = 0;
  uint64_t asked = 0;  // The value of uses_ when the waiter asked.
};

class Residency {
 public:
  using DemandOf = std::function<Demand(AdapterKey adapter)>;
  // Returns the bytes of an adapter's tensors when they are off the device.
  using BytesOf = std::function<uint64_t(AdapterKey adapter)>;

  explicit Residency(const ResidencyOptions& options) : options_(options) {}

  // Adds a new adapter on the device, in the slot that a ticket got.
  void Add(AdapterKey adapter);
  // Adds an adapter that an earlier process left on disk.
  void AddOnDisk(AdapterKey adapter);
  // Frees a slot that a ticket got. Call it instead of Add if the adapter could
  // not be made.
  void ReturnSlot() { --granted_; }
  // Removes an adapter, even during a move. Returns false if it is unknown.
  bool Remove(AdapterKey adapter);

  // Call it when the adapter has work. Returns true if the adapter begins to
  // wait for a slot.
  bool Want(AdapterKey adapter);
  void WantSlot(uint64_t ticket) {
    waiters_.push_back({.ticket = ticket, .asked = uses_});
  }
  // Call it when the adapter has run work of these kinds.
  void Used(AdapterKey adapter, WorkKinds kinds);

  // Returns the next move, or none if no move should start now. An adapter that
  // leaves the device may not run from now on. An adapter that comes in may run
  // after Finished, if the move succeeded.
  std::optional<Move> Next(const DemandOf& demand_of, const BytesOf& bytes_of);

  // Returns whether this move of the adapter is running and the adapter exists.
  bool IsUnderway(const Move& move) const;
  // Ends a running move; does nothing unless IsUnderway. After a failed move
  // the adapter is where it was. Returns the waiter that gets no slot because
  // of the failure, if there is one. The returned waiter no longer waits.
  std::optional<SlotWaiter> Finished(const Move& move, bool ok);

  // Ends a running move to the device that only time can mend, if IsUnderway.
  // The adapter gives its slot back and waits for another, which it does not
  // get before Resume.
  void Postpone(const Move& move);
  void Resume(AdapterKey adapter);

  // Returns none if the adapter is unknown.
  std::optional<Location> LocationOf(AdapterKey adapter) const;
  // Returns whether the adapter is on the device and not leaving.
  bool CanRun(AdapterKey adapter) const;
  bool has_waiters() const { return !waiters_.empty(); }
  // Returns the number of adapters at each location. A moving adapter counts at
  // the location that it leaves.
  std::array<int, kNumAdapterLocations> Counts() const { return counts_; }

 private:
  struct Entry {
    Location location = Location::kDevice;
    uint64_t move_id = 0;  // > 0 during a move.
    Location target = Location::kDevice;
    bool waits = false;  // The adapter is among waiters_.
    bool postponed = false;
    WorkKinds served = 0;  // Kinds that ran since the adapter came in.
    uint64_t last_use = 0;
    uint64_t bytes = 0;  // Bytes off the device, while it has a slot.
  };
  using Entries = std::map<AdapterKey, Entry>;

  // Returns the counter of the location.
  int& CountAt(Location location) {
    return counts_[static_cast<size_t>(location)];
  }
  static bool HasSlot(const Entry& entry);
  int UsedSlots() const;
  // Returns whether an adapter may come in. A pinned one always may if there is
  // a slot, because others that are pinned with it do not leave.
  bool HasRoom(bool pinned) const;
  int LeavingDevice() const;
  // Returns whether the waiter's adapter cannot come in yet: it is still moving
  // away, or is postponed.
  bool IsAbsent(const SlotWaiter& waiter) const;
  void DropWaiter(AdapterKey adapter);
  // Removes waiters whose adapters have no work that could run.
  void DropSatisfied(const DemandOf& demand_of);
  std::optional<Move> BringIn();
  std::optional<Move> MakeSlot(const DemandOf& demand_of);
  // Returns the first waiter that could come in now, or end().
  std::deque<SlotWaiter>::iterator FirstInLine();
  // Returns the least recently used entry on the host that neither moves nor
  // waits for a slot, or end().
  Entries::iterator OldestOnHost();
  // Returns the adapter that should leave the device, or end(). Sets *ready to
  // whether this adapter has work that could run. If it has such work, it was
  // served (head of this file). `asked` is the SlotWaiter::asked of the first
  // waiter.
  Entries::iterator PickVictim(const DemandOf& demand_of, uint64_t asked,
                               bool* ready);
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

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_RESIDENCY_H_
