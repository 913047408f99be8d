// The metrics that show how the device's memory was divided at the start.
#ifndef WEFT_SRC_ENGINE_MEMORY_METRICS_H_
#define WEFT_SRC_ENGINE_MEMORY_METRICS_H_

#include "src/base/metrics.h"
#include "src/engine/memory_split.h"

namespace weft::engine {

// All values are 0 until Set is called. On the CPU, Set is never called.
// Threads: any.
class MemoryMetrics {
 public:
  explicit MemoryMetrics(prometheus::Registry* registry);

  void Set(const MemorySplit& split);

 private:
  LabelledGauges part_bytes_;
  LabelledGauges part_short_;
  prometheus::Gauge& batch_tokens_limit_;
  prometheus::Gauge& recomputed_layers_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_MEMORY_METRICS_H_
