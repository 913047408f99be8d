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
                 "What the device's memory was given to at the start; 0 on "
                 "the CPU.",
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
                 "1 where the device's memory, and nothing else, keeps a "
                 "part from being larger.",
                 {{"part", part}}),
        limit == Limit::kMemory ? 1 : 0);
  }
  set(AddGauge(registry, "weft_max_batch_tokens",
               "Tokens of the longest micro-batch that memory was given to; 0 "
               "on the CPU."),
      split.batch_tokens);
  set(AddGauge(registry, "weft_recomputed_layers",
               "Layers that such a one recomputes."),
      split.recomputed_layers);
}

}  // namespace weft::engine
