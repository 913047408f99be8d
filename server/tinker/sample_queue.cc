#include "server/tinker/sample_queue.h"

#include <algorithm>
#include <set>
#include <utility>

namespace weft::tinker {

void SampleQueue::Add(const std::string& owner, WaitingSample sample) {
  owners_[owner].push_back(std::move(sample));
}

bool SampleQueue::Advance(
    const std::function<bool(const std::string& owner,
                             const WaitingSample& sample)>& start) {
  // A sample that ends within `start` may call Advance in its callback. This
  // inner call does nothing.
  if (std::exchange(advances_, true)) return false;
  std::set<std::string> blocked;
  const auto is_blocked = [&blocked](const auto& entry) {
    return blocked.contains(entry.first);
  };
  while (!std::ranges::all_of(owners_, is_blocked)) {
    auto next = owners_.upper_bound(last_);
    if (next == owners_.end()) next = owners_.begin();
    last_ = next->first;
    if (blocked.contains(last_)) continue;
    const WaitingSample sample = std::move(next->second.front());
    next->second.pop_front();
    if (!start(last_, sample)) {
      owners_[last_].push_front(sample);
      blocked.insert(last_);
      continue;
    }
    // A callback within `start` may have removed the owner's other samples.
    next = owners_.find(last_);
    if (next != owners_.end() && next->second.empty()) owners_.erase(next);
  }
  advances_ = false;
  return !owners_.empty();
}

bool SampleQueue::Remove(const std::string& owner, const std::string& id) {
  const auto found = owners_.find(owner);
  if (found == owners_.end()) return false;
  std::deque<WaitingSample>& samples = found->second;
  const auto sample = std::ranges::find(samples, id, &WaitingSample::id);
  if (sample == samples.end()) return false;
  samples.erase(sample);
  if (samples.empty()) owners_.erase(found);
  return true;
}

}  // namespace weft::tinker
