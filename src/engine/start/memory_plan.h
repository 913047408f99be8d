// Divides a CUDA device's memory between adapters, key/value cache, activations
// and decode graphs. Parts that the operator has set stay as they are.
#ifndef WEFT_SRC_ENGINE_START_MEMORY_PLAN_H_
#define WEFT_SRC_ENGINE_START_MEMORY_PLAN_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "src/base/options/options.h"
#include "src/engine/decode/kv_pool.h"
#include "src/engine/start/memory_split.h"
#include "src/engine/train/activation_budget.h"
#include "src/model_config/model_config.h"

namespace weft::engine {

// Tokens of a usual sequence, prompt and completion together. The key/value
// cache is meant to hold --max-decode-sequences sequences of this length, or of
// --max-context if that is less.
inline constexpr int64_t kUsualSequenceTokens = 2048;

// Returns the format that the operator wants for the base model's matrices.
inline model_config::MatrixFormat MatrixFormatOf(const EngineOptions& options) {
  return options.base_weights == BaseWeights::kInt8
             ? model_config::MatrixFormat::kInt8
             : model_config::MatrixFormat::kDtype;
}

// Returns INVALID_ARGUMENT for --weights=int8 with --dtype=f32, because a CUDA
// device computes products with 8-bit weights in bf16.
absl::Status CheckCudaFormat(const EngineOptions& options);

// Returns the most tokens that a sequence may have: the model's positions, or
// the operator's number if it is set. Errors: INVALID_ARGUMENT if this number
// is above the model's positions.
absl::StatusOr<int> ContextTokens(const EngineOptions& options,
                                  const model_config::ModelConfig& config);

// Returns the bytes that an adapter takes on rank 0's device if it has the LoRA
// rank `max_rank` on every module (expert_rank.h for experts). The bytes
// include the weights in f32, their copy in the model's dtype if the dtype is
// not f32, the gradient, scratch and two moments. If several ranks share each
// layer, rank 0 holds the whole adapter, and also a copy and a gradient of its
// own part. The copy and this gradient are counted at the size of the whole
// adapter.
int64_t LargestAdapterBytes(const ModelSizes& sizes, int max_rank);

// Returns the bytes of activations of a micro-batch with one sequence of
// `num_tokens` tokens. Assumes that every token is scored, and that the
// adapters have the largest LoRA rank and train lm_head.
ActivationBytes BatchActivations(const ModelSizes& sizes,
                                 const EngineOptions& options,
                                 int64_t num_tokens);

// Estimates the bytes that decode graphs keep between iterations: the tensors
// of a decode step with --max-decode-sequences sequences. Graphs of smaller
// steps share these tensors. Returns 0 if there are no graphs: with
// --no-decode-graphs, if several ranks share each layer, or if the model has
// experts whose weights are not in bf16. Counts graphs of experts also for a
// device without grouped products, which then has no graphs.
int64_t DecodeGraphBytes(const ModelSizes& sizes, const EngineOptions& options);

// Divides `available_bytes`. Sets max_resident_adapters, kv_cache_bytes,
// memory_budget_bytes and max_batch_tokens if they are 0. Limits
// max_resident_adapters to max_adapters. Turns decode_graphs off if they get no
// memory. REQUIRES: `options` has max_context_tokens from ContextTokens.
// Errors: INVALID_ARGUMENT if kv_cache_bytes is set to less than one page and
// the fewest states; those of SplitMemory.
absl::StatusOr<MemorySplit> PlanMemory(const ModelSizes& sizes,
                                       int64_t available_bytes,
                                       EngineOptions* options);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_START_MEMORY_PLAN_H_
