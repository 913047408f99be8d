// Decides how long a training batch waits for other adapters.
//
// Clients that train in step send their requests within a few milliseconds.
// Without a wait the first request would run alone, and the others in a batch
// after it. So a batch with gradients waits for the adapters that trained
// lately, for about a hundredth of the time that it will take and at most 5 ms.
// It starts at once when it has all of them, when it is large, and when there
// is nobody to wait for.
// A deterministic state machine without clock and threads. Not thread-safe.
#ifndef WEFT_SRC_SCHED_BATCH_WINDOW_H_
#define WEFT_SRC_SCHED_BATCH_WINDOW_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "absl/time/time.h"
#include "src/request/adapter_key.h"
#include "src/sched/adapter_queue.h"
#include "src/sched/work.h"

namespace weft::sched {

class BatchWindow {
 public:
  // A batch that is a quarter full starts at once.
  explicit BatchWindow(int64_t max_batch_tokens)
      : large_batch_tokens_(max_batch_tokens / 4) {}

  // Returns whether the batch waits that could start with the first work of
  // these queues. It does not wait for `absent` adapters. The first call since
  // the latest Start or NoteIdle begins the wait.
  [[nodiscard]] bool Waits(const std::vector<AdapterQueue*>& ready,
                           const std::set<AdapterKey>& absent, absl::Time now);
  // Returns when the wait is over if the latest Waits returned true; otherwise
  // InfiniteFuture.
  [[nodiscard]] absl::Time start() const { return start_; }
  // Notes that a batch of some of these queues starts.
  void Start(const Plan& plan, const std::vector<AdapterQueue*>& ready,
             absl::Time now);
  // Notes how long the batch ran that started last.
  void Ran(absl::Duration elapsed);
  // Notes that there is nothing to run.
  void NoteIdle();
  void Forget(AdapterKey adapter) { trained_at_.erase(adapter); }

 private:
  [[nodiscard]] absl::Duration WindowOf(int64_t tokens) const;
  [[nodiscard]] bool LacksAdapters(const std::set<AdapterKey>& present,
                                   const std::set<AdapterKey>& absent,
                                   absl::Time now) const;

  const int64_t large_batch_tokens_;
  std::map<AdapterKey, absl::Time> trained_at_;
  std::optional<absl::Time> wait_began_;
  absl::Time start_ = absl::InfiniteFuture();
  int64_t running_tokens_ = 0;
  double seconds_per_token_ = 0;  // An average of late batches; 0: not known.
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_BATCH_WINDOW_H_
