// The metrics of the write-ahead log (log_writer.h).
#ifndef WEFT_SRC_LOG_LOG_METRICS_H_
#define WEFT_SRC_LOG_LOG_METRICS_H_

#include "src/base/metrics.h"

namespace weft::journal {

struct LogMetrics {
  explicit LogMetrics(prometheus::Registry* registry);

  prometheus::Counter& bytes;
  prometheus::Counter& records;
  prometheus::Histogram& sync_seconds;
  prometheus::Gauge& pending_bytes;
  prometheus::Gauge& stalled;
};

}  // namespace weft::journal

#endif  // WEFT_SRC_LOG_LOG_METRICS_H_
