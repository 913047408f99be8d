#include "server/call/stalled_calls.h"

#include "src/base/clock.h"

namespace weft::server {

void StalledCalls::Await(grpc::CallbackServerContext* context, int64_t bytes) {
  const absl::Time limit =
      SteadyNow() + kPatience + kPatiencePerMiB * (bytes >> 20);
  MutexLock lock(&mu_);
  limits_[context] = limit;
}

void StalledCalls::Forget(grpc::CallbackServerContext* context) {
  MutexLock lock(&mu_);
  limits_.erase(context);
}

void StalledCalls::Cancel(absl::Time now) {
  // While the lock is held, no OnDone ends and frees its context. TryCancel
  // runs no callback of the call: gRPC gives those to threads of its own.
  MutexLock lock(&mu_);
  std::erase_if(limits_, [now](const auto& call) {
    if (call.second > now) return false;
    call.first->TryCancel();
    return true;
  });
}

}  // namespace weft::server
