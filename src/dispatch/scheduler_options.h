// The limits and weights of the scheduler.
#ifndef WEFT_SRC_DISPATCH_SCHEDULER_OPTIONS_H_
#define WEFT_SRC_DISPATCH_SCHEDULER_OPTIONS_H_

#include <cstdint>
#include <map>
#include <string>

#include "src/dispatch/queue_room.h"

namespace weft::sched {

struct SchedulerOptions {
  int64_t max_batch_tokens = 0;   // A larger single datum still runs.
  QueueLimits queue;              // Limits of waiting work of all kinds.
  double sampling_share = 0;      // In (0, 1).
  uint64_t reorder_window = 256;  // How far ahead a step number may be; >= 1.
  // Weights >= 1. A tenant that is not named has weight 1.
  std::map<std::string, int64_t> tenant_weights = {};
};

}  // namespace weft::sched

#endif  // WEFT_SRC_DISPATCH_SCHEDULER_OPTIONS_H_
