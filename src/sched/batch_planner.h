// Fills one micro-batch, or picks one barrier, from the adapters that have work
// ready. The adapter whose turn it is goes first and decides the kind of plan.
// The others fill the remaining room in turn, as far as the order of their own
// work allows.
#ifndef WEFT_SRC_SCHED_BATCH_PLANNER_H_
#define WEFT_SRC_SCHED_BATCH_PLANNER_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "src/sched/adapter_queue.h"
#include "src/sched/fair_shares.h"
#include "src/sched/work.h"

namespace weft::sched {

// Starts the returned work and charges it to `shares`. Each of `queues` has
// ready work and nothing on the device.
Plan PlanBatch(const std::vector<AdapterQueue*>& queues, absl::Time now,
               int64_t max_batch_tokens, FairShares& shares);

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_BATCH_PLANNER_H_
