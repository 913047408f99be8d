#include "src/dispatch/residency.h"

#include <algorithm>
#include <utility>

namespace weft::dispatch {

void Residency::Add(AdapterKey adapter) {
  --granted_;
  entries_[adapter] = {.last_use = ++uses_};
  ++CountAt(Location::kDevice);
}

void Residency::AddOnDisk(AdapterKey adapter) {
  entries_[adapter] = {.location = Location::kDisk};
  ++CountAt(Location::kDisk);
}

bool Residency::Remove(AdapterKey adapter) {
  DropWaiter(adapter);
  const auto it = entries_.find(adapter);
  if (it == entries_.end()) return false;
  --CountAt(it->second.location);
  entries_.erase(it);
  return true;
}

void Residency::DropWaiter(AdapterKey adapter) {
  const auto it = entries_.find(adapter);
  if (it == entries_.end() || !it->second.waits) return;
  it->second.waits = false;
  std::erase_if(waiters_, [&](const SlotWaiter& waiter) {
    return waiter.ticket == 0 && waiter.adapter == adapter;
  });
}

bool Residency::Want(AdapterKey adapter) {
  const auto it = entries_.find(adapter);
  if (it == entries_.end() || it->second.waits || CanRun(adapter)) return false;
  const Entry& entry = it->second;
  if (entry.move_id > 0 && entry.target == Location::kDevice) return false;
  it->second.waits = true;
  waiters_.push_back({.adapter = adapter, .asked = uses_});
  return true;
}

void Residency::Used(AdapterKey adapter, WorkKinds kinds) {
  const auto it = entries_.find(adapter);
  if (it == entries_.end()) return;
  it->second.served |= kinds;
  it->second.last_use = ++uses_;
}

std::optional<Location> Residency::LocationOf(AdapterKey adapter) const {
  const auto it = entries_.find(adapter);
  if (it == entries_.end()) return std::nullopt;
  return it->second.location;
}

bool Residency::CanRun(AdapterKey adapter) const {
  const auto it = entries_.find(adapter);
  return it != entries_.end() && it->second.location == Location::kDevice &&
         it->second.move_id == 0;
}

bool Residency::HasSlot(const Entry& entry) {
  // From the start of its move in to the end of its move out.
  return entry.location == Location::kDevice ||
         (entry.move_id > 0 && entry.target == Location::kDevice);
}

int Residency::UsedSlots() const {
  return granted_ +
         static_cast<int>(std::ranges::count_if(
             entries_, [](const auto& item) { return HasSlot(item.second); }));
}

bool Residency::HasRoom(bool pinned) const {
  const int used = UsedSlots();
  if (used >= options_.max_resident) return false;
  if (used == 0 || pinned || options_.device_bytes == 0) return true;
  uint64_t held = 0;
  uint64_t largest = 0;
  for (const auto& [adapter, entry] : entries_) {
    if (!HasSlot(entry)) continue;
    held += entry.bytes;
    largest = std::max(largest, entry.bytes);
  }
  // Adapters that do not exist yet may be as large as the largest.
  return held + static_cast<uint64_t>(granted_) * largest <
         options_.device_bytes;
}

int Residency::LeavingDevice() const {
  return static_cast<int>(std::ranges::count_if(entries_, [](const auto& item) {
    return item.second.location == Location::kDevice && item.second.move_id > 0;
  }));
}

void Residency::DropSatisfied(const DemandOf& demand_of) {
  std::erase_if(waiters_, [&](const SlotWaiter& waiter) {
    if (waiter.ticket > 0 || demand_of(waiter.adapter).ready != 0) {
      return false;
    }
    entries_.at(waiter.adapter).waits = false;
    return true;
  });
}

std::optional<Move> Residency::Next(const DemandOf& demand_of,
                                    const BytesOf& bytes_of) {
  if (waiters_.empty()) return std::nullopt;
  DropSatisfied(demand_of);
  if (waiters_.empty()) return std::nullopt;
  for (auto& [adapter, entry] : entries_) {
    if (HasSlot(entry)) entry.bytes = bytes_of(adapter);
  }
  const auto first = FirstInLine();
  const bool pinned = first != waiters_.end() && first->ticket == 0 &&
                      demand_of(first->adapter).busy;
  return HasRoom(pinned) ? BringIn() : MakeSlot(demand_of);
}

std::optional<Move> Residency::BringIn() {
  const auto first = FirstInLine();
  if (first == waiters_.end()) return std::nullopt;
  const SlotWaiter waiter = std::move(*first);
  waiters_.erase(first);
  if (waiter.ticket > 0) {
    ++granted_;
    return Move{.ticket = waiter.ticket};
  }
  const auto it = entries_.find(waiter.adapter);
  it->second.waits = false;
  return StartMove(it, Location::kDevice);
}

bool Residency::IsAbsent(const SlotWaiter& waiter) const {
  if (waiter.ticket > 0) return false;
  const Entry& entry = entries_.at(waiter.adapter);
  return entry.move_id > 0 || entry.postponed;
}

std::deque<SlotWaiter>::iterator Residency::FirstInLine() {
  return std::ranges::find_if(
      waiters_, [&](const SlotWaiter& waiter) { return !IsAbsent(waiter); });
}

std::optional<Move> Residency::MakeSlot(const DemandOf& demand_of) {
  // A waiter that cannot come in yet needs no slot. So no other adapter has to
  // leave for this waiter.
  const auto absent = std::ranges::count_if(
      waiters_, [&](const SlotWaiter& waiter) { return IsAbsent(waiter); });
  const auto needed = static_cast<int>(waiters_.size() - absent);
  if (LeavingDevice() >= needed) return std::nullopt;
  bool ready = false;
  const auto victim = PickVictim(demand_of, FirstInLine()->asked, &ready);
  if (victim == entries_.end()) return std::nullopt;
  const uint64_t bytes = victim->second.bytes;
  uint64_t on_host = 0;
  uint64_t leaving_host = 0;
  for (const auto& [adapter, entry] : entries_) {
    const bool arriving = entry.move_id > 0 && entry.target == Location::kHost;
    if (entry.location != Location::kHost && !arriving) continue;
    on_host += entry.bytes;
    if (entry.move_id > 0 && !arriving) leaving_host += entry.bytes;
  }
  Location to = Location::kDisk;
  if (bytes <= options_.host_bytes) {
    if (on_host + bytes <= options_.host_bytes) {
      to = Location::kHost;
    } else if (on_host - leaving_host + bytes <= options_.host_bytes) {
      return std::nullopt;
    } else if (const auto oldest = OldestOnHost(); oldest != entries_.end()) {
      return StartMove(oldest, Location::kDisk);
    }
  }
  const Move move = StartMove(victim, to);
  if (ready) Want(move.adapter);
  return move;
}

Residency::Entries::iterator Residency::OldestOnHost() {
  auto oldest = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    const Entry& entry = it->second;
    // An adapter that waits for a slot is not sent to disk, because it comes
    // back soon.
    if (entry.location != Location::kHost || entry.move_id > 0 || entry.waits) {
      continue;
    }
    if (oldest == entries_.end() || entry.last_use < oldest->second.last_use) {
      oldest = it;
    }
  }
  return oldest;
}

Residency::Entries::iterator Residency::PickVictim(const DemandOf& demand_of,
                                                   uint64_t asked,
                                                   bool* ready) {
  auto victim = entries_.end();
  *ready = true;
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    const Entry& entry = it->second;
    if (entry.location != Location::kDevice || entry.move_id > 0) continue;
    const Demand demand = demand_of(it->first);
    const bool has_work = demand.ready != 0;
    const bool had_its_turn =
        (demand.ready & ~entry.served) == 0 && entry.last_use > asked;
    if (demand.busy || (has_work && !had_its_turn)) continue;
    // Prefers adapters without work, and among equals the least recently used.
    if (victim == entries_.end() ||
        std::pair(has_work, entry.last_use) <
            std::pair(*ready, victim->second.last_use)) {
      victim = it;
      *ready = has_work;
    }
  }
  return victim;
}

Move Residency::StartMove(Entries::iterator it, Location to) {
  Entry& entry = it->second;
  entry.move_id = ++moves_;
  entry.target = to;
  return {.id = entry.move_id,
          .adapter = it->first,
          .from = entry.location,
          .to = to};
}

bool Residency::IsUnderway(const Move& move) const {
  const auto it = entries_.find(move.adapter);
  return it != entries_.end() && it->second.move_id == move.id;
}

std::optional<SlotWaiter> Residency::Finished(const Move& move, bool ok) {
  if (!IsUnderway(move)) return std::nullopt;
  Entry& entry = entries_.at(move.adapter);
  entry.move_id = 0;
  if (ok) {
    --CountAt(entry.location);
    ++CountAt(move.to);
    entry.location = move.to;
    if (move.to == Location::kDevice) {
      entry.served = 0;
      entry.last_use = ++uses_;
    }
    return std::nullopt;
  }
  if (move.to == Location::kDevice) return SlotWaiter{.adapter = move.adapter};
  // The adapter stays on the device, so it no longer waits for a slot.
  if (move.from == Location::kDevice) DropWaiter(move.adapter);
  // A second move would probably fail too, so the first waiter gets an error.
  const auto first = FirstInLine();
  if (first == waiters_.end() || HasRoom(/*pinned=*/false)) {
    return std::nullopt;
  }
  const SlotWaiter failed = *first;
  waiters_.erase(first);
  if (failed.ticket == 0) entries_.at(failed.adapter).waits = false;
  return failed;
}

void Residency::Postpone(const Move& move) {
  if (!IsUnderway(move)) return;
  Entry& entry = entries_.at(move.adapter);
  entry.move_id = 0;
  entry.postponed = true;
  Want(move.adapter);
}

void Residency::Resume(AdapterKey adapter) {
  const auto it = entries_.find(adapter);
  if (it != entries_.end()) it->second.postponed = false;
}

}  // namespace weft::dispatch
