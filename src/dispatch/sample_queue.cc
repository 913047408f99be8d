#include "src/dispatch/sample_queue.h"

#include <algorithm>
#include <utility>

namespace weft::dispatch {

void SampleQueue::AddAdapter(AdapterKey adapter, const std::string& tenant) {
  shares_.Add(adapter, tenant);
}

std::vector<uint64_t> SampleQueue::RemoveAdapter(AdapterKey adapter) {
  std::vector<uint64_t> ids;
  const auto lane = lanes_.find(adapter);
  if (lane != lanes_.end()) {
    for (const auto& [arrival, entry] : lane->second) ids.push_back(entry.id);
    lanes_.erase(lane);
  }
  held_.erase(adapter);
  shares_.Remove(adapter);
  return ids;
}

void SampleQueue::SetHeld(AdapterKey adapter, bool held) {
  if (held) {
    held_.insert(adapter);
  } else {
    held_.erase(adapter);
  }
  // A held adapter counts as idle, so it earns no credit.
  if (lanes_.contains(adapter)) shares_.SetActive(adapter, !held);
}

void SampleQueue::Add(Entry entry) {
  if (!held_.contains(entry.adapter)) shares_.SetActive(entry.adapter, true);
  lanes_[entry.adapter].emplace(entry.arrival, std::move(entry));
}

SampleQueue::Lane::const_iterator SampleQueue::Head(const Lane& lane,
                                                    absl::Time now) {
  return std::find_if(lane.begin(), lane.end(), [now](const auto& waiting) {
    return waiting.second.deadline > now;
  });
}

void SampleQueue::Erase(AdapterKey adapter, Lane::const_iterator entry) {
  const auto lane = lanes_.find(adapter);
  lane->second.erase(entry);
  if (!lane->second.empty()) return;
  shares_.SetActive(adapter, false);
  lanes_.erase(lane);
}

std::optional<SampleQueue::Entry> SampleQueue::Take(
    absl::Time now, const std::set<std::string>& without) {
  std::optional<FairShares::Turn> first;
  Lane::const_iterator best;
  for (const auto& [adapter, lane] : lanes_) {
    if (held_.contains(adapter) ||
        without.contains(shares_.TenantOf(adapter))) {
      continue;
    }
    const auto head = Head(lane, now);
    if (head == lane.end()) continue;
    const FairShares::Turn turn = shares_.TurnOf(adapter);
    if (!first || turn < *first) {
      first = turn;
      best = head;
    }
  }
  if (!first) return std::nullopt;
  Entry entry = best->second;
  shares_.Charge(entry.adapter, entry.tokens);
  Erase(entry.adapter, best);
  return entry;
}

void SampleQueue::PutBack(Entry entry) {
  shares_.Refund(entry.adapter, entry.tokens);
  lanes_[entry.adapter].emplace(entry.arrival, std::move(entry));
}

void SampleQueue::Remove(AdapterKey adapter, uint64_t arrival) {
  Erase(adapter, lanes_.at(adapter).find(arrival));
}

bool SampleQueue::HasReady(absl::Time now) const {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) {
    return !held_.contains(lane.first) &&
           Head(lane.second, now) != lane.second.end();
  });
}

bool SampleQueue::HasWaiting(AdapterKey adapter) const {
  return lanes_.contains(adapter);  // Lanes are never empty.
}

}  // namespace weft::dispatch
