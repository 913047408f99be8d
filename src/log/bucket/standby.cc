#include "src/log/bucket/standby.h"

#include <pthread.h>

#include <utility>

#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/log/bucket/state_bucket.h"

namespace weft::log {
namespace {

bool StoreIsAway(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

}  // namespace

absl::Status TakeWhenFree(
    StateBucket* bucket, const Instance& self,
    const std::function<void(const Manifest& owner)>& waiting) {
  LogWatch watch(self, kOwnerPatience);
  bool waits = false;
  bool away = false;
  for (;; absl::SleepFor(kLookInterval)) {
    const absl::StatusOr<bool> taken = bucket->TryTake(self, &watch);
    if (taken.ok() && *taken) {
      Log(LogLevel::kInfo, "the state is this process's",
          {{"instance", self.name}, {"epoch", bucket->owner()->epoch()}});
      return absl::OkStatus();
    }
    if (!taken.ok() && !StoreIsAway(taken.status())) return taken.status();
    if (taken.ok() && !std::exchange(waits, true)) {
      Log(LogLevel::kInfo, "standing by: another process has the state",
          {{"owner", bucket->seen().owner.name},
           {"address", bucket->seen().owner.address}});
    }
    if (!taken.ok() && !std::exchange(away, true)) {
      Log(LogLevel::kWarning, "the store of the state does not answer",
          {{"reason", taken.status().message()}});
    }
    if (!taken.ok()) continue;
    away = false;
    waiting(bucket->seen());
  }
}

HeartbeatThread::HeartbeatThread(LogOwner* owner)
    : owner_(*owner), thread_([this] { Loop(); }) {}

HeartbeatThread::~HeartbeatThread() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
}

void HeartbeatThread::Loop() {
  pthread_setname_np(pthread_self(), "weft-beat");
  absl::Time next = SteadyNow() + kBeatInterval;
  for (;;) {
    {
      MutexLock lock(&mu_);
      while (!stopping_ && SteadyNow() < next) {
        changed_.WaitFor(&mu_, absl::ToChronoNanoseconds(next - SteadyNow()));
      }
      if (stopping_) return;
    }
    next = SteadyNow() + kBeatInterval;
    // Only the log needs the store. It says so when it cannot write.
    owner_.Beat().IgnoreError();
    if (!owner_.fenced().ok()) return;
  }
}

}  // namespace weft::log
