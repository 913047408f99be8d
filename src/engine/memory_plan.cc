#include "src/engine/memory_plan.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "src/base/status_macros.h"
#include "src/engine/activation_budget.h"
#include "src/engine/head_options.h"
#include "src/engine/kv_pool.h"
#include "src/group/rank.h"
#include "src/lora/adapter_layout.h"
#include "src/model/model_shard.h"

namespace weft::engine {
namespace {

constexpr int64_t kFloatBytes = 4;
// Weights, gradient, scratch and two moments.
constexpr int64_t kMasterCopies = 5;

// Long enough for full GEMM rate on a large device; a small one may take less,
// down to what is still worth a kernel launch.
constexpr int64_t kMostBatchTokens = 16384;
constexpr int64_t kLeastBatchTokens = 512;

int64_t ElementBytes(const model::Decoder& decoder) {
  return static_cast<int64_t>(at::elementSize(decoder.dtype()));
}

}  // namespace

int64_t LargestAdapterBytes(const model::Decoder& decoder, int max_rank) {
  LoraConfig config{.rank = max_rank};
  config.target_modules.assign(kAllTargetModules.begin(),
                               kAllTargetModules.end());
  const lora::AdapterLayout layout(decoder.config().shape(), config);
  int64_t bytes = kMasterCopies * kFloatBytes;
  if (decoder.dtype() != at::kFloat) bytes += ElementBytes(decoder);
  // Its part of the compute copy, and of the gradient that is under way.
  if (decoder.tensor_size() > 1) bytes += ElementBytes(decoder) + kFloatBytes;
  return bytes * layout.num_parameters();
}

int64_t LeastActivationBytes(const model::Decoder& decoder,
                             const EngineOptions& options, int64_t num_tokens) {
  const model::ModelConfig config =
      model::LargestConfig(decoder.config(), decoder.tensor_size());
  const int recomputed =
      options.gradient_checkpointing == GradientCheckpointing::kOff
          ? 0
          : config.num_layers;
  return ActivationsOf(config, ElementBytes(decoder), options.max_rank,
                       {.rows = num_tokens,
                        .scored = num_tokens,
                        .entries = num_tokens,
                        .chunk = loss::HeadChunkRows(
                            HeadOptionsOf(options, decoder), num_tokens,
                            config.vocab, decoder.device().is_cpu()),
                        .head_rank = options.max_rank})
      .Total(config.num_layers, recomputed);
}

absl::StatusOr<MemorySplit> PlanMemory(const model::Decoder& decoder,
                                       int64_t available_bytes,
                                       EngineOptions* options) {
  const int64_t context_bytes = group::PageBytes(decoder, kPageTokens) *
                                KvPool::PagesFor(options->max_context_tokens);
  const int64_t least_tokens = options->max_batch_tokens == 0
                                   ? kLeastBatchTokens
                                   : options->max_batch_tokens;
  const int64_t full_tokens = options->max_batch_tokens == 0
                                  ? kMostBatchTokens
                                  : options->max_batch_tokens;
  WEFT_ASSIGN_OR_RETURN(
      const MemorySplit split,
      SplitMemory(
          {.available = available_bytes,
           .adapter = LargestAdapterBytes(decoder, options->max_rank),
           .context = context_bytes,
           .activations = LeastActivationBytes(decoder, *options, least_tokens),
           .full_batch = LeastActivationBytes(decoder, *options, full_tokens),
           .most_adapters =
               std::min(kDefaultResidentAdapters, options->max_adapters),
           .most_cache = context_bytes * options->max_decode_sequences,
           .wanted_adapters =
               std::min(options->max_resident_adapters, options->max_adapters),
           .wanted_cache = options->kv_cache_bytes,
           .wanted_activations = options->memory_budget_bytes}));
  options->max_resident_adapters = static_cast<int>(split.num_adapters);
  options->kv_cache_bytes = split.cache;
  options->memory_budget_bytes = split.activations;
  if (options->max_batch_tokens == 0) {
    int64_t tokens = kMostBatchTokens;
    while (tokens > kLeastBatchTokens &&
           LeastActivationBytes(decoder, *options, tokens) >
               split.activations) {
      tokens /= 2;
    }
    options->max_batch_tokens = tokens;
  }
  return split;
}

}  // namespace weft::engine
