// Shares a CUDA device's memory out between adapters, key/value cache and
// activations, as far as the operator has not.
#ifndef WEFT_SRC_ENGINE_MEMORY_PLAN_H_
#define WEFT_SRC_ENGINE_MEMORY_PLAN_H_

#include <cstdint>

#include "absl/status/status.h"
#include "src/config/options.h"
#include "src/engine/memory_split.h"
#include "src/model/decoder.h"

namespace weft::engine {

// What an adapter of that rank, with LoRA on everything that can have it, takes
// of rank 0's device: weights and their compute copy, gradients, scratch,
// moments; of several ranks also rank 0's own part.
[[nodiscard]] int64_t LargestAdapterBytes(const model::Decoder& decoder,
                                          int max_rank);

// Activations of a micro-batch of `num_tokens` in one sequence, every one
// scored, with as many layers recomputed as the policy allows.
[[nodiscard]] int64_t LeastActivationBytes(const model::Decoder& decoder,
                                           const EngineOptions& options,
                                           int64_t num_tokens);

// Fills in max_resident_adapters, kv_cache_bytes, memory_budget_bytes and
// max_batch_tokens where they are 0, given what the device still has.
// Errors: those of SplitMemory.
[[nodiscard]] absl::StatusOr<MemorySplit> PlanMemory(
    const model::Decoder& decoder, int64_t available_bytes,
    EngineOptions* options);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_MEMORY_PLAN_H_
