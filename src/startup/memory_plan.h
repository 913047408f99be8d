// Divides a CUDA device's memory between adapters, key/value cache, activations
// and graphs, as far as the operator has not set the parts.
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

// Prompt and completion tokens of a usual sequence in decoding. The cache is
// sized for --max-decode-sequences sequences of this length, or of
// --max-context if that is less.
inline constexpr int64_t kUsualSequenceTokens = 2048;

// The numbers on which the sizes depend.
struct ModelSizes {
  model::ModelConfig config;  // Config of the whole model.
  int tensor_size = 1;        // Ranks that share every layer.
  int64_t element_bytes = 2;  // For activations, cache and copies.
};
[[nodiscard]] ModelSizes SizesOf(const model::Decoder& decoder);

// Returns how the operator wants the base model's matrices.
[[nodiscard]] inline model::MatrixFormat MatrixFormatOf(
    const EngineOptions& options) {
  return options.base_weights == BaseWeights::kInt8
             ? model::MatrixFormat::kInt8
             : model::MatrixFormat::kDtype;
}

// Returns INVALID_ARGUMENT for 8 bits with --dtype=f32, because CUDA widens
// such weights to bf16.
[[nodiscard]] absl::Status CheckCudaFormat(const EngineOptions& options);

// Returns the most tokens of a sequence: the operator's number, limited by the
// model's positions.
[[nodiscard]] int ContextTokens(const EngineOptions& options,
                                const model::ModelConfig& config);

// Returns the bytes on rank 0's device of an adapter with the given LoRA rank
// on every module: weights and their compute copy, gradients, scratch, moments.
// With several ranks it includes rank 0's own part.
[[nodiscard]] int64_t LargestAdapterBytes(const ModelSizes& sizes,
                                          int max_rank);

// Returns the activations of a micro-batch of `num_tokens` in one sequence.
// Every token is scored, and adapters have the largest LoRA rank and train
// lm_head.
[[nodiscard]] ActivationBytes BatchActivations(const ModelSizes& sizes,
                                               const EngineOptions& options,
                                               int64_t num_tokens);

// Returns the bytes that decode graphs keep between iterations: the tensors of
// a step of --max-decode-sequences, which smaller graphs share. Returns 0 if
// there are no graphs, because ranks share every layer or because of
// --no-decode-graphs.
[[nodiscard]] int64_t DecodeGraphBytes(const ModelSizes& sizes,
                                       const EngineOptions& options);

// Sets max_resident_adapters, kv_cache_bytes, memory_budget_bytes and
// max_batch_tokens from the device's free bytes, where they are 0. REQUIRES:
// `options` has max_context_tokens from ContextTokens. Errors: those of
// SplitMemory.
[[nodiscard]] absl::StatusOr<MemorySplit> PlanMemory(const ModelSizes& sizes,
                                                     int64_t available_bytes,
                                                     EngineOptions* options);

}  // namespace weft::engine

#endif  // WEFT_SRC_STARTUP_MEMORY_PLAN_H_
