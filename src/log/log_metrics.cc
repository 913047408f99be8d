#include "src/log/log_metrics.h"

namespace weft::journal {

LogMetrics::LogMetrics(prometheus::Registry* registry)
    : bytes(AddCounter(registry, "weft_journal_bytes_total",
                       "Bytes of the write-ahead log that are on disk")),
      records(AddCounter(registry, "weft_journal_records_total",
                         "Records of the write-ahead log that are on disk")),
      sync_seconds(AddHistogram(registry, "weft_journal_sync_seconds",
                                "Time of one sync of the write-ahead log",
                                ExponentialBuckets(0.001, 2, 14))),
      pending_bytes(AddGauge(registry, "weft_journal_pending_bytes",
                             "Bytes of records that wait for the disk")),
      stalled(AddGauge(registry, "weft_journal_stalled",
                       "1 while the disk is full, is short of its reserve, or "
                       "too much waits for it")) {}

}  // namespace weft::journal
