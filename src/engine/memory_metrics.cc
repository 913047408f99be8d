#include "src/engine/memory_metrics.h"

#include <string>
#include <vector>

namespace weft::engine {
namespace {

// The parts of a device's memory. kParts has the names of all of them, and
// kLimitedParts the names of the first four.
enum Part : size_t {
  kActivations,
  kKvCache,
  kDecodeGraphs,
  kAdapters,
  kModel,
  kReserve
};
const std::vector<std::string> kLimitedParts = {"activations", "kv_cache",
                                                "decode_graphs", "adapters"};
const std::vector<std::string> kParts = {
    "activations", "kv_cache", "decode_graphs", "adapters", "model", "reserve"};

}  // namespace

MemoryMetrics::MemoryMetrics(prometheus::Registry* registry)
    : part_bytes_(registry, "weft_memory_part_bytes",
                  "What the device's memory was given to at the start; 0 on "
                  "the CPU.",
                  "part", kParts),
      part_short_(registry, "weft_memory_part_short",
                  "1 where the device's memory, and nothing else, keeps a "
                  "part from being larger.",
                  "part", kLimitedParts),
      batch_tokens_limit_(AddGauge(registry, "weft_max_batch_tokens",
                                   "Tokens of the longest micro-batch that "
                                   "memory was given to; 0 on the CPU.")),
      recomputed_layers_(AddGauge(registry, "weft_recomputed_layers",
                                  "Layers that such a one recomputes.")) {}

void MemoryMetrics::Set(const MemorySplit& split) {
  const auto set = [](prometheus::Gauge& gauge, int64_t value) {
    gauge.Set(static_cast<double>(value));
  };
  set(part_bytes_[kActivations], split.activations);
  set(part_bytes_[kKvCache], split.cache);
  set(part_bytes_[kDecodeGraphs], split.decode_graphs);
  set(part_bytes_[kAdapters], split.adapters);
  set(part_bytes_[kModel], split.model);
  set(part_bytes_[kReserve], split.reserve);
  const auto set_short = [&](Part part, Limit limit) {
    part_short_[part].Set(limit == Limit::kMemory ? 1 : 0);
  };
  set_short(kActivations, split.batch_limit);
  set_short(kKvCache, split.cache_limit);
  set_short(kDecodeGraphs, split.graphs_limit);
  set_short(kAdapters, split.adapters_limit);
  set(batch_tokens_limit_, split.batch_tokens);
  set(recomputed_layers_, split.recomputed_layers);
}

}  // namespace weft::engine
