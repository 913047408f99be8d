// Chooses the next plan from the adapters that have training work ready: one
// micro-batch, or one barrier (a step that runs alone). The adapter whose turn
// it is goes first and decides the kind of plan. Then adapters fill the rest of
// a micro-batch in turn, if their next work is of the same kind and fits. Held
// teachers (scheduler.h) of a micro-batch are the same.
#ifndef WEFT_SRC_DISPATCH_BATCH_PLANNER_H_
#define WEFT_SRC_DISPATCH_BATCH_PLANNER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "absl/time/time.h"
#include "src/dispatch/adapter_queue.h"
#include "src/dispatch/fair_shares.h"
#include "src/dispatch/scheduled_work.h"
#include "src/request/adapter_key.h"

namespace weft::dispatch {

// Returns the plan, starts its work in `queues` and charges it to `shares`.
// REQUIRES: each of `queues` is active in `shares`, has an item that is ready
// at `now`, and has no item on the device.
Plan PlanBatch(const std::vector<AdapterQueue*>& queues,
               const std::set<AdapterKey>& held, absl::Time now,
               int64_t max_batch_tokens, FairShares& shares);

// Decides how long a training batch waits for other adapters.
//
// Clients that train at the same pace send their requests within a few
// milliseconds. Without a wait, the first request would run alone, and the
// other requests would run in a batch after it. So a batch with gradients waits
// for the adapters that trained within the last minute. The wait is 1 % of the
// time that the batch is expected to take, and at most 5 ms. A batch starts at
// once if, for example, it has work of all these adapters, it is large, or its
// wait would be under 0.2 ms.
// A deterministic state machine without clock and threads. Not thread-safe.
class BatchWindow {
 public:
  // A batch of at least a quarter of `max_batch_tokens` starts at once.
  explicit BatchWindow(int64_t max_batch_tokens)
      : large_batch_tokens_(max_batch_tokens / 4) {}

  // Returns whether a batch with the first work of the `ready` queues waits for
  // more adapters. The batch does not wait for `absent` adapters, whose work
  // cannot start. The first call since the latest Start or NoteIdle begins the
  // wait.
  bool Waits(const std::vector<AdapterQueue*>& ready,
             const std::set<AdapterKey>& absent, absl::Time now);
  // Returns the time at which the wait ends; InfiniteFuture if no batch waits.
  absl::Time start() const { return start_; }
  // Notes that `plan` has started, with work of some of the `ready` queues.
  void Start(const Plan& plan, const std::vector<AdapterQueue*>& ready,
             absl::Time now);
  // Notes that the latest started batch ran for `elapsed`.
  void Ran(absl::Duration elapsed);
  // Returns the tokens that a batch computes in this time; 0 if that is not
  // known yet.
  int64_t TokensOf(absl::Duration elapsed) const;
  // Notes that no work can run.
  void NoteIdle();
  void Forget(AdapterKey adapter) { trained_at_.erase(adapter); }

 private:
  absl::Duration WindowOf(int64_t tokens) const;
  bool LacksAdapters(const std::set<AdapterKey>& present,
                     const std::set<AdapterKey>& absent, absl::Time now) const;

  const int64_t large_batch_tokens_;
  std::map<AdapterKey, absl::Time> trained_at_;
  std::optional<absl::Time> wait_began_;
  absl::Time start_ = absl::InfiniteFuture();
  int64_t running_tokens_ = 0;
  double seconds_per_token_ = 0;  // A moving average; 0: not known.
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_BATCH_PLANNER_H_
