// Waits for a log in an object store, and shows others that its owner lives.
#ifndef WEFT_SRC_LOG_BUCKET_STANDBY_H_
#define WEFT_SRC_LOG_BUCKET_STANDBY_H_

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/observe/metrics.h"
#include "src/base/threads/mutex.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/manifest.h"
#include "src/log/bucket/sample_load.h"

namespace weft::log {

class StateBucket;

struct OwnerMetrics {
  explicit OwnerMetrics(prometheus::Registry* registry);

  prometheus::Gauge& epoch;
  prometheus::Gauge& log;
  prometheus::Gauge& logs;
  prometheus::Gauge& beat_age_seconds;
  SampleLoad samples;  // What each beat tells.
};

// An owner changes its manifest at this interval.
inline constexpr absl::Duration kBeatInterval = absl::Seconds(2);
// A standby looks at all manifests at this interval.
inline constexpr absl::Duration kLookInterval = absl::Seconds(1);
// An owner whose manifest does not change for this time counts as dead.
inline constexpr absl::Duration kOwnerPatience = absl::Seconds(5);
// A store that did not take a beat for this time does not answer. A beat takes
// its own time, too.
inline constexpr absl::Duration kStoreSilence = absl::Seconds(5);
// A look that takes longer shows that the store does not answer.
inline constexpr absl::Duration kLookPatience = absl::Seconds(2);

// Takes one of the `num_logs` logs of `bucket` as soon as one is free for
// `self`. Until then, calls `waiting` at each look with StateBucket::seen().
// Errors: those of StateBucket::TryTake but UNAVAILABLE, for which it looks
// again. Blocks. `metrics` outlives the bucket.
absl::Status TakeWhenFree(
    StateBucket* bucket, int num_logs, const Instance& self,
    OwnerMetrics* metrics,
    const std::function<void(const Manifest& owner)>& waiting);

// Beats at an interval, on a thread of its own, until another process has the
// log or the object ends.
class HeartbeatThread {
 public:
  HeartbeatThread(LogOwner* owner, OwnerMetrics* metrics);
  ~HeartbeatThread();
  HeartbeatThread(const HeartbeatThread&) = delete;
  HeartbeatThread& operator=(const HeartbeatThread&) = delete;

  // Returns whether the store took a beat lately. Threads: any.
  bool store_answers() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Loop();

  LogOwner& owner_;
  OwnerMetrics* const metrics_;
  mutable Mutex mu_;
  CondVar changed_;
  absl::Time last_ ABSL_GUARDED_BY(mu_);  // The latest beat.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_STANDBY_H_
