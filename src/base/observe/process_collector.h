// The standard process_* metrics, which prometheus-cpp does not have: CPU
// seconds, resident and virtual bytes, open and maximum file descriptors,
// threads, start time. Also the lines that the log of the process has dropped.
// Every scrape reads them anew, most of them from /proc.
//
// Errors: if a file cannot be read, its metrics are left out.
// Threads: any.
#ifndef WEFT_SRC_BASE_OBSERVE_PROCESS_COLLECTOR_H_
#define WEFT_SRC_BASE_OBSERVE_PROCESS_COLLECTOR_H_

#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace weft {

class ProcessCollector final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_OBSERVE_PROCESS_COLLECTOR_H_
