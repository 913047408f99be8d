#include "src/log/bucket/standby.h"

#include <pthread.h>

#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/log/bucket/state_bucket.h"

namespace weft::log {
OwnerMetrics::OwnerMetrics(prometheus::Registry* registry)
    : epoch(
          AddGauge(registry, "weft_state_epoch",
                   "The epoch of the state of --state: each process that takes "
                   "it has a higher one. 0: another process has it.")),
      log(AddGauge(registry, "weft_state_log",
                   "The number of the log of --state that this process has. "
                   "-1: none.")),
      logs(AddGauge(registry, "weft_state_logs",
                    "The number of logs of --state, which is --logs. 0 before "
                    "this process can take one.")),
      beat_age_seconds(
          AddGauge(registry, "weft_state_beat_age_seconds",
                   "Seconds since this process last told the store of --state "
                   "that it lives. 0 without --state.")),
      samples(registry) {
  log.Set(-1);
}

absl::Status TakeWhenFree(
    StateBucket* bucket, int num_logs, const Instance& self,
    OwnerMetrics* metrics,
    const std::function<void(const Manifest& owner)>& waiting) {
  std::vector<LogWatch> watches(
      num_logs, LogWatch(self, kOwnerPatience, kLookInterval + kLookPatience));
  metrics->logs.Set(num_logs);
  bool waits = false;
  bool away = false;
  for (;; absl::SleepFor(kLookInterval)) {
    const absl::StatusOr<bool> taken = bucket->TryTake(self, &watches);
    if (taken.ok() && *taken) {
      bucket->StartBeats(metrics);
      const LogOwner& owner = *bucket->owner();
      metrics->epoch.Set(static_cast<double>(owner.epoch()));
      metrics->log.Set(owner.keys().log);
      Log(LogLevel::kInfo, "the state is this process's",
          {{"instance", self.name},
           {"log", owner.keys().log},
           {"epoch", owner.epoch()}});
      return absl::OkStatus();
    }
    if (!taken.ok() && !store::IsAway(taken.status())) return taken.status();
    if (taken.ok() && !std::exchange(waits, true)) {
      Log(LogLevel::kInfo, "standing by: another process has the state",
          {{"owner", bucket->seen().owner.name},
           {"address", bucket->seen().owner.address}});
    }
    if (!taken.ok() && !std::exchange(away, true)) {
      Log(LogLevel::kWarning, "the store of the state does not answer",
          {{"reason", taken.status().message()}});
    }
    if (taken.ok()) away = false;
    waiting(bucket->seen());
  }
}

HeartbeatThread::HeartbeatThread(LogOwner* owner, OwnerMetrics* metrics)
    : owner_(*owner),
      metrics_(metrics),
      last_(SteadyNow()),
      thread_([this] { Loop(); }) {}

HeartbeatThread::~HeartbeatThread() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
}

bool HeartbeatThread::store_answers() const {
  MutexLock lock(&mu_);
  return SteadyNow() - last_ < kStoreSilence;
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
    const absl::Time start = SteadyNow();
    next = start + kBeatInterval;
    // The log says when the store does not answer, so nothing is said here.
    const bool ok = owner_.Beat(metrics_->samples.queued_tokens()).ok();
    if (!owner_.fenced().ok()) return;
    MutexLock lock(&mu_);
    if (ok) last_ = start;
    metrics_->beat_age_seconds.Set(absl::ToDoubleSeconds(SteadyNow() - last_));
  }
}

}  // namespace weft::log
