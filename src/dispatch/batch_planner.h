// Chooses the next plan from the adapters that have training work ready: one
// micro-batch, or one barrier (a step that runs alone). The adapter whose turn
// it is goes first and decides the kind of plan. Then adapters fill the rest of
// a micro-batch in turn, if their next work is of the same kind and fits.
#ifndef WEFT_SRC_DISPATCH_BATCH_PLANNER_H_
#define WEFT_SRC_DISPATCH_BATCH_PLANNER_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "src/dispatch/adapter_queue.h"
#include "src/dispatch/fair_shares.h"
#include "src/dispatch/scheduled_work.h"

namespace weft::sched {

// Returns the plan, starts its work in `queues` and charges it to `shares`.
// REQUIRES: each of `queues` is active in `shares`, has an item that is ready
// at `now`, and has no item on the device.
Plan PlanBatch(const std::vector<AdapterQueue*>& queues, absl::Time now,
               int64_t max_batch_tokens, FairShares& shares);

}  // namespace weft::sched

#endif  // WEFT_SRC_DISPATCH_BATCH_PLANNER_H_
