#include "src/dispatch/adapter_queue.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "src/base/reason.h"

namespace weft::dispatch {
namespace {

bool Expired(const AdapterQueue::Entry& entry, absl::Time now) {
  return entry.next_datum == 0 && entry.item.deadline <= now;
}

}  // namespace

AdapterQueue::AdapterQueue(AdapterKey key, std::string name, uint64_t last_step)
    : key_(key),
      name_(std::move(name)),
      last_step_(last_step),
      missing_(last_step + 1) {}

absl::StatusOr<uint64_t> AdapterQueue::NumberFor(const WorkItem& item) const {
  if (IsBaseModel(key_) || item.unnumbered) return 0;
  const uint64_t step = item.step;
  if (step == 0) {
    const bool takes = item.kind != WorkKind::kAdapterOp || item.numbered;
    return takes ? HighestTaken() + 1 : 0;
  }
  const auto refused = [&](absl::StatusCode code, const std::string& problem) {
    return WithReason(
        absl::Status(code,
                     absl::StrCat("step ", step, " of adapter \"", name_, "\" ",
                                  problem, "; expected step ", missing_)),
        {.name = "STEP_OUT_OF_ORDER",
         .values = {{"adapter", name_},
                    {"step", absl::StrCat(step)},
                    {"expected_step", absl::StrCat(missing_)}}});
  };
  using enum absl::StatusCode;
  if (step <= last_step_) return refused(kFailedPrecondition, "is in the past");
  if (applied_ahead_.contains(step))
    return refused(kAlreadyExists, "was applied");
  if (Taken(step)) return refused(kAlreadyExists, "is waiting or running");
  return step;
}

uint64_t AdapterQueue::Ahead(uint64_t step) const {
  if (IsBaseModel(key_)) return 0;
  const uint64_t place = step > 0 ? step : HighestTaken();
  return place > missing_ ? place - missing_ : 0;
}

void AdapterQueue::Add(WorkItem item, uint64_t number, uint64_t arrival) {
  if (item.unnumbered) {
    Entry entry{.item = std::move(item), .arrival = arrival};
    unnumbered_.emplace(arrival, std::move(entry));
    return;
  }
  const bool automatic = number != 0 && item.step == 0;
  Place place{.number = number, .after = 0};
  if (number == 0) {
    place = {.number = IsBaseModel(key_) ? 0 : HighestTaken(),
             .after = arrival};
  }
  item.step = number;
  PutWaiting(place, Entry{.item = std::move(item),
                          .arrival = arrival,
                          .automatic = automatic});
  SkipTaken();
}

const AdapterQueue::Entry* AdapterQueue::Ready(absl::Time now) const {
  const Entry* ordered = ReadyInOrder(now);
  const Entry* unnumbered = ReadyUnnumbered(now);
  if (ordered == nullptr || unnumbered == nullptr) {
    return ordered == nullptr ? unnumbered : ordered;
  }
  if (ordered->next_datum > 0) return ordered;
  // All slices of a request must see the same weights, so a request that has
  // started goes first.
  if (unnumbered->next_datum > 0) return unnumbered;
  return unnumbered->arrival < ordered->arrival ? unnumbered : ordered;
}

const AdapterQueue::Entry* AdapterQueue::ReadyUnnumbered(absl::Time now) const {
  if (unnumbered_.empty()) return nullptr;
  const Entry& head = unnumbered_.begin()->second;
  const bool blocked = std::ranges::any_of(
      running_, [](const Running& running) { return running.entry.barrier(); });
  return blocked || Expired(head, now) ? nullptr : &head;
}

const AdapterQueue::Entry* AdapterQueue::ReadyInOrder(absl::Time now) const {
  if (waiting_.empty()) return nullptr;
  const Entry& head = waiting_.begin()->second;
  if (Expired(head, now)) return nullptr;
  for (const Running& running : running_) {
    if (running.entry.barrier() || head.barrier()) return nullptr;
  }
  if (head.item.step == 0) return &head;
  // `head` is the first waiting work, so no lower number waits. Each lower
  // number was applied, is on the device, or is missing.
  return head.item.step < missing_ ? &head : nullptr;
}

std::optional<AdapterQueue::Started> AdapterQueue::StartTrain(
    absl::Time now, bool backward, int64_t room, int64_t max_batch_tokens,
    bool take_any) {
  const Entry* head = Ready(now);
  if (head == nullptr || head->barrier() || head->item.backward != backward) {
    return std::nullopt;
  }
  const std::vector<int64_t>& tokens = head->item.datum_tokens;
  const auto num_data = static_cast<int64_t>(tokens.size());
  if (head->item.tokens <= max_batch_tokens) {
    if (head->item.tokens > room) return std::nullopt;
    return StartData(*head, num_data);
  }
  // A plan that already has whole requests of this adapter gets no slice of a
  // request that exceeds a micro-batch.
  if (on_device()) return std::nullopt;
  int64_t end = head->next_datum;
  room -= head->prefix(end);
  while (end < num_data && tokens[end] <= room) room -= tokens[end++];
  if (end == head->next_datum) {
    if (!take_any) return std::nullopt;
    room -= tokens[end++];
  }
  // The slice may exceed `room` if the excess costs no more than running the
  // prefix again in the next slice.
  while (end < num_data && tokens[end] - room <= head->prefix(end)) {
    room -= tokens[end++];
  }
  return StartData(*head, end - head->next_datum);
}

AdapterQueue::Running AdapterQueue::TakeReady(const Entry& ready) {
  if (ready.item.unnumbered) {
    return {
        .place = {},
        .entry = std::move(unnumbered_.extract(unnumbered_.begin()).mapped())};
  }
  auto node = waiting_.extract(waiting_.begin());
  waiting_places_.erase(node.mapped().item.id);
  return {.place = node.key(), .entry = std::move(node.mapped())};
}

AdapterQueue::Started AdapterQueue::StartData(const Entry& ready,
                                              int64_t num_data) {
  Running running = TakeReady(ready);
  Entry& entry = running.entry;
  entry.in_flight = num_data;
  const auto first = entry.item.datum_tokens.begin() + entry.next_datum;
  const Started started{
      .slice = {.work_id = entry.item.id,
                .first_datum = entry.next_datum,
                .num_data = num_data,
                .last = entry.done_after_flight()},
      .tokens = std::accumulate(first, first + num_data,
                                entry.prefix(entry.next_datum))};
  running_.push_back(std::move(running));
  return started;
}

AdapterQueue::Started AdapterQueue::StartBarrier() {
  Running running = TakeReady(waiting_.begin()->second);
  const WorkItem& item = running.entry.item;
  // Every barrier has a cost, because a stream of barriers without a cost would
  // starve other adapters.
  const Started started{.slice = {.work_id = item.id},
                        .tokens = std::max<int64_t>(item.tokens, 1)};
  running_.push_back(std::move(running));
  return started;
}

bool AdapterQueue::Finish(uint64_t id, bool ok, bool more) {
  const auto it =
      std::find_if(running_.begin(), running_.end(),
                   [id](const Running& r) { return r.entry.item.id == id; });
  if (it == running_.end()) return false;
  Running running = std::move(*it);
  running_.erase(it);
  Entry& entry = running.entry;
  if (ok && (more || !entry.done_after_flight())) {
    entry.next_datum += entry.barrier() ? 1 : std::exchange(entry.in_flight, 0);
    if (entry.item.unnumbered) {
      const uint64_t arrival = entry.arrival;
      unnumbered_.emplace(arrival, std::move(entry));
    } else {
      PutWaiting(running.place, std::move(entry));
    }
    return false;
  }
  if (entry.item.step != 0) {
    Apply(entry.item.step);
  }
  return true;
}

bool AdapterQueue::Remove(uint64_t id) {
  const auto beside = std::ranges::find_if(
      unnumbered_, [id](const auto& e) { return e.second.item.id == id; });
  if (beside != unnumbered_.end()) {
    if (beside->second.next_datum > 0) return false;
    unnumbered_.erase(beside);
    return true;
  }
  const auto place = waiting_places_.find(id);
  if (place == waiting_places_.end()) return false;
  const auto it = waiting_.find(place->second);
  const uint64_t step = it->second.item.step;
  if (it->second.next_datum > 0 || (step != 0 && step < missing_)) return false;
  const bool automatic = it->second.automatic;
  waiting_.erase(it);
  waiting_places_.erase(place);
  // If a higher number is taken, the number is skipped, because no caller knows
  // it.
  if (automatic && HighestTaken() >= step) {
    Apply(step);
    SkipTaken();
  }
  return true;
}

bool AdapterQueue::Empty(uint64_t id) {
  const auto place = waiting_places_.find(id);
  if (place == waiting_places_.end()) return false;
  Entry& entry = waiting_.at(place->second);
  const uint64_t step = entry.item.step;
  if (entry.next_datum > 0 || step == 0 || step >= missing_) return false;
  entry.item = {.id = id,
                .kind = WorkKind::kAdapterOp,
                .adapter = key_,
                .step = step,
                .empty = true,
                .tokens = 1};
  return true;
}

void AdapterQueue::SkipTo(uint64_t step) {
  last_step_ = std::max(last_step_, step);
  missing_ = last_step_ + 1;
}

std::vector<uint64_t> AdapterQueue::Unfinishable() const {
  std::vector<uint64_t> ids;
  for (const Running& running : running_) {
    if (!running.entry.done_after_flight())
      ids.push_back(running.entry.item.id);
  }
  for (const auto& [place, entry] : waiting_) ids.push_back(entry.item.id);
  for (const auto& [arrival, entry] : unnumbered_) {
    ids.push_back(entry.item.id);
  }
  return ids;
}

bool AdapterQueue::Taken(uint64_t number) const {
  if (number <= last_step_ || applied_ahead_.contains(number) ||
      waiting_.contains({.number = number, .after = 0})) {
    return true;
  }
  return std::any_of(running_.begin(), running_.end(),
                     [number](const Running& running) {
                       return running.entry.item.step == number;
                     });
}

uint64_t AdapterQueue::HighestTaken() const {
  uint64_t highest = last_step_;
  if (!applied_ahead_.empty()) {
    highest = std::max(highest, *applied_ahead_.rbegin());
  }
  if (!waiting_.empty()) {
    highest = std::max(highest, waiting_.rbegin()->first.number);
  }
  for (const Running& running : running_) {
    highest = std::max(highest, running.entry.item.step);
  }
  return highest;
}

void AdapterQueue::SkipTaken() {
  while (Taken(missing_)) ++missing_;
}

void AdapterQueue::Apply(uint64_t number) {
  applied_ahead_.insert(number);
  while (!applied_ahead_.empty() && *applied_ahead_.begin() == last_step_ + 1) {
    applied_ahead_.erase(applied_ahead_.begin());
    ++last_step_;
  }
}

void AdapterQueue::PutWaiting(const Place& place, Entry entry) {
  waiting_places_[entry.item.id] = place;
  waiting_.emplace(place, std::move(entry));
}

}  // namespace weft::dispatch
