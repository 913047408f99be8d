// The metrics that show how the device's memory was divided at the start.
#ifndef WEFT_SRC_ENGINE_START_MEMORY_METRICS_H_
#define WEFT_SRC_ENGINE_START_MEMORY_METRICS_H_

#include "prometheus/registry.h"
#include "src/engine/start/memory_split.h"

namespace weft::engine {

// Adds the metrics to the registry. On the CPU, the split has only zeros.
void ShowMemory(const MemorySplit& split, prometheus::Registry* registry);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_START_MEMORY_METRICS_H_
