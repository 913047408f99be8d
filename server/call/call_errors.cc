#include "server/call/call_errors.h"

#include <algorithm>
#include <tuple>

namespace weft::server {
namespace {

auto KindOf(const CallError& error) {
  return std::tie(error.rpc, error.code, error.reason, error.adapter_id);
}

}  // namespace

void CallErrors::Add(const Caller& caller, CallError error) {
  error.tenant = caller.tenant();
  const Owner owner(caller.tenant(), caller.sees_all());
  MutexLock lock(&mu_);
  if (errors_.size() >= kMaxOwners && !errors_.contains(owner)) {
    errors_.erase(std::ranges::min_element(
        errors_, {}, [](const auto& kept) { return kept.second.back().at; }));
  }
  std::deque<CallError>& kept = errors_[owner];
  const auto same = std::ranges::find_if(kept, [&](const CallError& other) {
    return KindOf(other) == KindOf(error);
  });
  if (same != kept.end()) {
    error.count += same->count;
    kept.erase(same);
  }
  kept.push_back(std::move(error));
  if (kept.size() > kMaxKept) kept.pop_front();
}

std::vector<CallError> CallErrors::Latest(const Caller& caller,
                                          size_t max) const {
  std::vector<CallError> found;
  {
    MutexLock lock(&mu_);
    for (const auto& [owner, kept] : errors_) {
      if (!caller.sees_all() && owner != Owner(caller.tenant(), false)) {
        continue;
      }
      found.insert(found.end(), kept.begin(), kept.end());
    }
  }
  std::ranges::sort(found, std::greater(), &CallError::at);
  if (found.size() > max) found.resize(max);
  for (CallError& error : found) caller.Reveal(&error);
  return found;
}

}  // namespace weft::server
