// Shares a CUDA device's memory out between adapters, key/value cache,
// activations and graphs, as far as the operator has not.
#ifndef WEFT_SRC_STARTUP_MEMORY_PLAN_H_
#define WEFT_SRC_STARTUP_MEMORY_PLAN_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "src/config/options.h"
#include "src/model/decoder.h"
#include "src/model_config/model_config.h"
#include "src/startup/memory_split.h"
#include "src/train/activation_budget.h"

namespace weft::engine {

// A sequence in decoding, prompt and completion: the cache is sized for
// --max-decode-sequences of them, or of --max-context if that is less.
inline constexpr int64_t kUsualSequenceTokens = 2048;

// What sizes depend on.
struct ModelSizes {
  model::ModelConfig config;  // The whole model's.
  int tensor_size = 1;        // Ranks that share every layer.
  int64_t element_bytes = 2;  // In activations, cache and compute copies.
};
[[nodiscard]] ModelSizes SizesOf(const model::Decoder& decoder);

// Tokens of the longest sequence: what the operator wants, within what the
// model has positions for.
[[nodiscard]] int ContextTokens(const EngineOptions& options,
                                const model::ModelConfig& config);

// What an adapter of that rank, with LoRA on everything that can have it, takes
// of rank 0's device: weights and their compute copy, gradients, scratch,
// moments; of several ranks also rank 0's own part.
[[nodiscard]] int64_t LargestAdapterBytes(const ModelSizes& sizes,
                                          int max_rank);

// Activations of a micro-batch of `num_tokens` in one sequence, every one
// scored, with adapters of the largest rank that train lm_head too.
[[nodiscard]] ActivationBytes BatchActivations(const ModelSizes& sizes,
                                               const EngineOptions& options,
                                               int64_t num_tokens);

// What graphs of the decode step keep between iterations: its tensors at
// --max-decode-sequences, which the graphs of smaller steps share. 0 where
// there are none: ranks that share every layer, --no-decode-graphs.
[[nodiscard]] int64_t DecodeGraphBytes(const ModelSizes& sizes,
                                       const EngineOptions& options);

// Fills in max_resident_adapters, kv_cache_bytes, memory_budget_bytes and
// max_batch_tokens where they are 0, given what the device still has.
// Arguments: options with max_context_tokens as of ContextTokens.
// Errors: those of SplitMemory.
[[nodiscard]] absl::StatusOr<MemorySplit> PlanMemory(const ModelSizes& sizes,
                                                     int64_t available_bytes,
                                                     EngineOptions* options);

}  // namespace weft::engine

#endif  // WEFT_SRC_STARTUP_MEMORY_PLAN_H_
