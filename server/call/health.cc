#include "server/call/health.h"

#include <utility>

namespace weft::server {

void HealthBoard::Set(const std::string& service, Health health) {
  MutexLock lock(&mu_);
  services_[service] = health;
  for (const auto& [who, watcher] : watchers_) {
    if (watcher.service == service) watcher.show(health);
  }
}

Health HealthBoard::Of(const std::string& service) const {
  MutexLock lock(&mu_);
  return OfLocked(service);
}

Health HealthBoard::OfLocked(const std::string& service) const {
  const auto known = services_.find(service);
  return known == services_.end() ? Health::kUnknown : known->second;
}

void HealthBoard::Watch(const void* watcher, const std::string& service,
                        Show show) {
  MutexLock lock(&mu_);
  if (ended_) return show(std::nullopt);
  show(OfLocked(service));
  watchers_[watcher] = {.service = service, .show = std::move(show)};
}

void HealthBoard::Forget(const void* watcher) {
  decltype(watchers_)::node_type node;  // Destroyed after the lock's release.
  MutexLock lock(&mu_);
  node = watchers_.extract(watcher);
}

void HealthBoard::End() {
  decltype(watchers_) watchers;
  {
    MutexLock lock(&mu_);
    ended_ = true;
    watchers.swap(watchers_);
  }
  for (const auto& [who, watcher] : watchers) watcher.show(std::nullopt);
}

}  // namespace weft::server
