// Fills one micro-batch, or picks one barrier, from the adapters that have work
// ready. The adapter that was served the fewest tokens decides what kind of
// plan it is and goes first; the others fill the room it leaves, in the same
// order, each as far as its own order allows.
#ifndef WEFT_SRC_SCHED_BATCH_PLANNER_H_
#define WEFT_SRC_SCHED_BATCH_PLANNER_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "src/sched/adapter_queue.h"
#include "src/sched/work.h"

namespace weft::sched {

// Starts the work it returns. `queues`: each has ready work and nothing on the
// device. `virtual_time` follows the start times of what is chosen.
Plan PlanBatch(const std::vector<AdapterQueue*>& queues, absl::Time now,
               int64_t max_batch_tokens, int64_t* virtual_time);

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_BATCH_PLANNER_H_
