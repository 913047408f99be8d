// What the health service of grpc.health.v1 answers.
#ifndef WEFT_SERVER_CALL_HEALTH_H_
#define WEFT_SERVER_CALL_HEALTH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "src/base/threads/mutex.h"

namespace weft::server {

// HealthCheckResponse.ServingStatus.
enum class Health : uint8_t { kServing = 1, kNotServing = 2, kUnknown = 3 };

// What is known of each service. Threads: any.
class HealthBoard {
 public:
  // Gets what is known, or none when the server ends.
  using Show = std::function<void(std::optional<Health>)>;

  void Set(const std::string& service, Health health) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns kUnknown for a service that nobody has set.
  Health Of(const std::string& service) const ABSL_LOCKS_EXCLUDED(mu_);

  // Calls `show` now and at each change, until Forget or End. `show` may call
  // nothing of this object.
  void Watch(const void* watcher, const std::string& service, Show show)
      ABSL_LOCKS_EXCLUDED(mu_);
  void Forget(const void* watcher) ABSL_LOCKS_EXCLUDED(mu_);
  // Tells all watchers that the server ends.
  void End() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Watcher {
    std::string service;
    Show show;
  };

  Health OfLocked(const std::string& service) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::map<std::string, Health> services_ ABSL_GUARDED_BY(mu_);
  std::map<const void*, Watcher> watchers_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_HEALTH_H_
