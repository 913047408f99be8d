#include "src/sched/sample_queue.h"

#include <algorithm>
#include <utility>

namespace weft::sched {

void SampleQueue::Add(Entry entry) {
  Lane& lane = lanes_[entry.adapter];
  if (lane.waiting.empty()) {
    lane.virtual_time = std::max(lane.virtual_time, virtual_time_);
  }
  lane.waiting.emplace(entry.arrival, std::move(entry));
}

std::map<uint64_t, SampleQueue::Entry>::const_iterator SampleQueue::Head(
    const Lane& lane, absl::Time now) {
  return std::find_if(
      lane.waiting.begin(), lane.waiting.end(),
      [now](const auto& waiting) { return waiting.second.deadline > now; });
}

std::optional<SampleQueue::Entry> SampleQueue::Take(
    absl::Time now, const std::set<std::string>& held) {
  Lane* best = nullptr;
  std::map<uint64_t, Entry>::const_iterator best_head;
  for (auto it = lanes_.begin(); it != lanes_.end();) {
    Lane& lane = it->second;
    // A lane whose time has passed carries no memory worth keeping.
    if (lane.waiting.empty() && lane.virtual_time <= virtual_time_) {
      it = lanes_.erase(it);
      continue;
    }
    const bool is_held = held.contains(it->first);
    ++it;
    if (is_held) continue;
    const auto head = Head(lane, now);
    if (head == lane.waiting.end()) continue;
    if (best == nullptr ||
        std::pair(lane.virtual_time, head->first) <
            std::pair(best->virtual_time, best_head->first)) {
      best = &lane;
      best_head = head;
    }
  }
  if (best == nullptr) return std::nullopt;
  Entry entry = best_head->second;
  best->waiting.erase(best_head);
  virtual_time_ = std::max(virtual_time_, best->virtual_time);
  best->virtual_time += entry.tokens;
  return entry;
}

void SampleQueue::PutBack(Entry entry) {
  Lane& lane = lanes_[entry.adapter];
  lane.virtual_time = std::max<int64_t>(lane.virtual_time - entry.tokens, 0);
  lane.waiting.emplace(entry.arrival, std::move(entry));
}

bool SampleQueue::Remove(const std::string& adapter, uint64_t id) {
  const auto lane = lanes_.find(adapter);
  if (lane == lanes_.end()) return false;
  return std::erase_if(lane->second.waiting, [id](const auto& waiting) {
           return waiting.second.id == id;
         }) > 0;
}

std::vector<uint64_t> SampleQueue::RemoveAdapter(const std::string& adapter) {
  std::vector<uint64_t> ids;
  const auto lane = lanes_.find(adapter);
  if (lane == lanes_.end()) return ids;
  for (const auto& [arrival, entry] : lane->second.waiting) {
    ids.push_back(entry.id);
  }
  lanes_.erase(lane);
  return ids;
}

bool SampleQueue::HasReady(absl::Time now,
                           const std::set<std::string>& held) const {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) {
    return !held.contains(lane.first) &&
           Head(lane.second, now) != lane.second.waiting.end();
  });
}

bool SampleQueue::HasWaiting(const std::string& adapter) const {
  const auto lane = lanes_.find(adapter);
  return lane != lanes_.end() && !lane->second.waiting.empty();
}

}  // namespace weft::sched
