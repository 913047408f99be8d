// Decides which adapters have their tensors on the device when there are more
// adapters than device slots: who comes in next, and who leaves for it.
//
// In: those who want a slot get one in the order in which they asked. An
// adapter asks when it has work that could run; a new adapter asks by a ticket,
// since it has no tensors to bring yet.
//
// Out: the adapter used longest ago, among those without work that could run;
// when all have some, among those that were served since they came in, with
// each kind of work they have, and since the first in line asked: they then ask
// again. An adapter with work on the device never leaves. So every adapter that
// comes in is served, no more leave than there are others to come in, and
// everybody who asks gets a turn, also with one slot.
//
// Where to: host buffers as far as `host_bytes` go, whose own oldest ones make
// room by going to disk; without host buffers straight to disk.
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

// What the caller knows about an adapter that may have to move.
struct Demand {
  bool busy = false;    // Work of it is on the device, or between two slices.
  WorkKinds ready = 0;  // Kinds of its waiting work that could run.
};

struct Move {
  uint64_t id = 0;      // Names the move in Finished.
  uint64_t ticket = 0;  // > 0: a slot for a new adapter, nothing moves.
  AdapterKey adapter = AdapterKey::kBaseModel;
  Location from = Location::kDevice;
  Location to = Location::kDevice;
};

// Somebody who wants a slot: an adapter or a ticket.
struct SlotWaiter {
  AdapterKey adapter = AdapterKey::kBaseModel;
  uint64_t ticket = 0;
  uint64_t asked = 0;  // After so many uses.
};

class Residency {
 public:
  using DemandOf = std::function<Demand(AdapterKey adapter)>;
  // What its tensors take off the device.
  using BytesOf = std::function<uint64_t(AdapterKey adapter)>;

  explicit Residency(const ResidencyOptions& options) : options_(options) {}

  // A new adapter, on the device: takes over the slot of a ticket.
  void Add(AdapterKey adapter);
  // An adapter of an earlier process, on disk.
  void AddOnDisk(AdapterKey adapter) {
    entries_[adapter] = {.location = Location::kDisk};
  }
  // The holder of a ticket's slot made no adapter.
  void ReturnSlot() { --granted_; }
  // Also while it moves. False: unknown.
  bool Remove(AdapterKey adapter);

  // The adapter has work. True when it is not on the device and has not asked
  // before.
  bool Want(AdapterKey adapter);
  void WantSlot(uint64_t ticket) {
    waiters_.push_back({.ticket = ticket, .asked = uses_});
  }
  // The adapter was served: work of these kinds.
  void Used(AdapterKey adapter, WorkKinds kinds);

  // The next move to make, none when there is nothing to do until something
  // else happens. An adapter that leaves the device may not run from now on;
  // one that comes in only when Finished was called.
  std::optional<Move> Next(const DemandOf& demand_of, const BytesOf& bytes_of);

  // The adapter makes this move still: it was not removed meanwhile.
  [[nodiscard]] bool IsUnderway(const Move& move) const;
  // Ends a move that is under way (not a ticket's). A failed one leaves the
  // adapter where it was; returns who cannot be served for that and no longer
  // waits.
  std::optional<SlotWaiter> Finished(const Move& move, bool ok);

  // None: unknown.
  [[nodiscard]] std::optional<Location> LocationOf(AdapterKey adapter) const;
  // On the device, and not about to leave it.
  [[nodiscard]] bool CanRun(AdapterKey adapter) const;
  [[nodiscard]] bool has_waiters() const { return !waiters_.empty(); }
  // Adapters by location; a moving one counts where it comes from.
  [[nodiscard]] std::array<int, kNumAdapterLocations> Counts() const;

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

  [[nodiscard]] int UsedSlots() const;
  [[nodiscard]] int LeavingDevice() const;
  // A waiter that cannot come in yet because it is still on its way out.
  [[nodiscard]] bool IsLeaving(const SlotWaiter& waiter) const;
  void DropWaiter(AdapterKey adapter);
  // Those whose work has gone no longer wait.
  void DropSatisfied(const DemandOf& demand_of);
  std::optional<Move> BringIn();
  std::optional<Move> MakeSlot(const DemandOf& demand_of,
                               const BytesOf& bytes_of);
  // The first in line who could come in now; end(): none.
  [[nodiscard]] std::deque<SlotWaiter>::iterator FirstInLine();
  // end(): none.
  [[nodiscard]] Entries::iterator OldestOnHost();
  // An adapter with work is picked only if it was used after `asked`.
  [[nodiscard]] Entries::iterator PickVictim(const DemandOf& demand_of,
                                             uint64_t asked, bool* ready);
  Move StartMove(Entries::iterator it, Location to);

  const ResidencyOptions options_;
  Entries entries_;
  std::deque<SlotWaiter> waiters_;
  int granted_ = 0;  // Slots given to tickets and not taken over yet.
  uint64_t uses_ = 0;
  uint64_t moves_ = 0;
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_RESIDENCY_H_
