// Reports what a recovery has found and done.
#ifndef WEFT_SRC_ENGINE_RECOVERY_REPORT_H_
#define WEFT_SRC_ENGINE_RECOVERY_REPORT_H_

#include <cstdint>

#include "absl/time/time.h"
#include "src/log/log_summary.h"

namespace weft::engine {

struct RecoveryReport {
  LogSummary log;
  uint64_t adapters = 0;       // Adapters restored, even if removed later.
  uint64_t mismatches = 0;     // Optimizer steps that differ from the log.
  absl::Duration device_time;  // Time of the batches, steps and loads replayed.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_RECOVERY_REPORT_H_
