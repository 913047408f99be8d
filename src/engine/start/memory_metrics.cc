#include "src/engine/start/memory_metrics.h"

#include "src/base/observe/metrics.h"

namespace weft::engine {

void ShowMemory(const MemorySplit& split, prometheus::Registry* registry) {
  const auto set = [](prometheus::Gauge& gauge, int64_t value) {
    gauge.Set(static_cast<double>(value));
  };
  const std::pair<const char*, int64_t> parts[] = {
      {"activations", split.activations},
      {"kv_cache", split.cache},
      {"decode_graphs", split.decode_graphs},
      {"adapters", split.adapters},
      {"model", split.model},
      {"reserve", split.reserve}};
  for (const auto& [part, bytes] : parts) {
    set(AddGauge(registry, "weft_memory_part_bytes",
                 "Device memory given to each part at the start; 0 on the CPU.",
                 {{"part", part}}),
        bytes);
  }
  const std::pair<const char*, Limit> limits[] = {
      {"activations", split.batch_limit},
      {"kv_cache", split.cache_limit},
      {"decode_graphs", split.graphs_limit},
      {"adapters", split.adapters_limit}};
  for (const auto& [part, limit] : limits) {
    set(AddGauge(registry, "weft_memory_part_short",
                 "1 where memory, not a flag, keeps the part from being "
                 "larger.",
                 {{"part", part}}),
        limit == Limit::kMemory ? 1 : 0);
  }
  set(AddGauge(registry, "weft_max_batch_tokens",
               "Tokens of the longest micro-batch for which there is memory; "
               "0 on the CPU."),
      split.batch_tokens);
  set(AddGauge(registry, "weft_recomputed_layers",
               "Layers that the longest micro-batch recomputes; 0 on the CPU."),
      split.recomputed_layers);
}

}  // namespace weft::engine
