#include "src/engine/start/memory_plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/lora/adapter_layout.h"
#include "src/lora/expert_rank.h"
#include "src/loss/fused_head.h"
#include "src/model_config/model_shard.h"

namespace weft::engine {
namespace {

// The number of f32 values for each parameter of an adapter: weight, gradient,
// scratch (the gradient of a request that still runs) and two moments.
constexpr int64_t kMasterCopies = 5;

// The range of micro-batch lengths. More tokens than kMostBatchTokens gain
// nothing. Fewer than kLeastBatchTokens waste kernel launches. Lengths of
// kGoodBatchTokens and more are kBatchStep apart.
constexpr int64_t kMostBatchTokens = 16384;
constexpr int64_t kBatchStep = 1024;
constexpr int64_t kLeastBatchTokens = 512;

// Returns the lengths to choose from, ascending. If `wanted_tokens` is not 0,
// returns only this length.
std::vector<int64_t> BatchLengths(int64_t wanted_tokens) {
  if (wanted_tokens > 0) return {wanted_tokens};
  std::vector<int64_t> lengths;
  for (int64_t tokens = kLeastBatchTokens; tokens < kGoodBatchTokens;
       tokens *= 2) {
    lengths.push_back(tokens);
  }
  for (int64_t tokens = kGoodBatchTokens; tokens <= kMostBatchTokens;
       tokens += kBatchStep) {
    lengths.push_back(tokens);
  }
  return lengths;
}

// Sets the fields of `needs` that depend on micro-batches.
void SetBatches(const ModelSizes& sizes, const EngineOptions& options,
                MemoryNeeds& needs) {
  const int num_layers = sizes.config.num_layers;
  const GradientCheckpointing policy = options.gradient_checkpointing;
  if (policy == GradientCheckpointing::kAll)
    needs.least_recomputed = num_layers;
  if (policy != GradientCheckpointing::kOff) needs.most_recomputed = num_layers;
  const auto needs_of = [&](int64_t tokens) {
    const ActivationBytes bytes = BatchActivations(sizes, options, tokens);
    return BatchNeeds{
        .tokens = tokens,
        .bytes = bytes.Total(num_layers, needs.least_recomputed),
        .layer_saving = bytes.kept_layer - bytes.recomputed_layer};
  };
  for (const int64_t tokens : BatchLengths(options.max_batch_tokens)) {
    needs.batches.push_back(needs_of(tokens));
  }
  // If the operator sets the length of a micro-batch but not the number of
  // adapters, the micro-batch gets its memory before further adapters.
  const bool wants_batch =
      options.max_batch_tokens > 0 && options.max_resident_adapters == 0;
  const int64_t longest = needs.batches.back().tokens;
  needs.good_batch =
      needs_of(wants_batch ? longest : std::min(kGoodBatchTokens, longest))
          .bytes;
}

// Returns the bytes of a row of a decode step in a layer of the gated delta
// rule: the projected inputs, the output with and without its norm, and the
// earlier rows of the convolution before and after the step; in f32 what the
// convolution and the gates yield. Returns 0 if there is no such layer.
int64_t DeltaStepBytes(const ModelSizes& sizes) {
  if (!sizes.config.has_delta()) return 0;
  const model_config::DeltaShape& delta = sizes.config.delta;
  const int64_t gates = 2 * int64_t{delta.value_heads};
  const int64_t history = (delta.conv_kernel - 1) * delta.conv_width();
  return sizes.element_bytes * (delta.conv_width() + gates +
                                3 * delta.value_width() + 2 * history) +
         kFloatBytes * (delta.conv_width() + gates);
}

// Returns the bytes of a row of a decode step in a layer of experts: for each
// of the row's experts the input, the output, gate, up and their product; in
// f32 the router's logits and their softmax. Returns 0 if there is no such
// layer.
int64_t ExpertStepBytes(const model_config::ExpertShape& experts,
                        int64_t hidden, int64_t element_bytes) {
  return experts.per_token * (2 * hidden + 3 * experts.ffn) * element_bytes +
         2 * int64_t{experts.count} * kFloatBytes;
}

// Returns INVALID_ARGUMENT if --kv-cache-bytes is set to less than the cache
// takes at least.
absl::Status CheckCacheBytes(const CacheUnits& units,
                             const EngineOptions& options) {
  const CacheCounts counts =
      CountsIn(units, /*bytes=*/0, options.max_decode_sequences);
  const int64_t least = counts.pages * units.page + counts.states * units.state;
  if (options.kv_cache_bytes == 0 || options.kv_cache_bytes >= least) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--kv-cache-bytes=", options.kv_cache_bytes, " is below ", least,
      ", the bytes of ", kPageTokens, " tokens",
      counts.states > 0 ? absl::StrCat(" and of ", counts.states, " states")
                        : "",
      ". Raise the flag, or set 0 for the default"));
}

}  // namespace

absl::Status CheckCudaFormat(const EngineOptions& options) {
  if (options.base_weights == BaseWeights::kInt8 &&
      options.dtype == Dtype::kF32) {
    return absl::InvalidArgumentError(
        "--weights=int8 with --dtype=f32: on CUDA, weights of 8 bits are "
        "computed in bf16");
  }
  return absl::OkStatus();
}

absl::StatusOr<int> ContextTokens(const EngineOptions& options,
                                  const model_config::ModelConfig& config) {
  const auto positions = static_cast<int>(config.max_positions);
  if (options.max_context_tokens <= positions) {
    return options.max_context_tokens == 0 ? positions
                                           : options.max_context_tokens;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--max-context=", options.max_context_tokens,
      " is above the model's limit of ", positions,
      " tokens (config.json: max_position_embeddings, or the original "
      "positions "
      "times factor with yarn). Lower the flag, or raise the model's limit"));
}

int64_t LargestAdapterBytes(const ModelSizes& sizes, int max_rank) {
  LoraConfig config{.rank = max_rank};
  config.target_modules.assign(kAllTargetModules.begin(),
                               kAllTargetModules.end());
  const model_config::ModelShape shape = sizes.config.shape();
  const auto shared = lora::WithExpertRank(config, shape);
  const lora::AdapterLayout layout(shape, shared.ok() ? *shared : config);
  int64_t bytes = kMasterCopies * kFloatBytes;
  if (sizes.element_bytes < kFloatBytes) bytes += sizes.element_bytes;
  // If several ranks share each layer, rank 0 holds the whole adapter, and also
  // a copy and a gradient of its own part. The copy and this gradient are
  // counted at the size of the whole adapter.
  if (sizes.tensor_size > 1) bytes += sizes.element_bytes + kFloatBytes;
  return bytes * layout.num_parameters();
}

ActivationBytes BatchActivations(const ModelSizes& sizes,
                                 const EngineOptions& options,
                                 int64_t num_tokens) {
  const model_config::ModelConfig config =
      model_config::LargestConfig(sizes.config, sizes.tensor_size);
  const int64_t chunk =
      loss::HeadChunkRows({.chunk_rows = options.loss_chunk_size}, num_tokens,
                          config.vocab, /*is_cpu=*/false);
  return ActivationsOf(config, sizes.element_bytes, /*is_cpu=*/false,
                       options.max_rank,
                       {.rows = num_tokens,
                        .scored = num_tokens,
                        .entries = num_tokens,
                        .chunk = chunk,
                        .head_rank = options.max_rank});
}

int64_t DecodeGraphBytes(const ModelSizes& sizes,
                         const EngineOptions& options) {
  // If several ranks share each layer, there are no decode graphs.
  if (!options.decode_graphs || sizes.tensor_size > 1) return 0;
  const model_config::ModelShape shape = sizes.config.shape();
  const model_config::ExpertShape& experts = shape.experts;
  // Only grouped products compute experts whose rows the host does not count.
  const bool has_grouped_products =
      sizes.element_bytes < kFloatBytes &&
      MatrixFormatOf(options) == model_config::MatrixFormat::kDtype;
  if (experts.count > 0 && !has_grouped_products) return 0;
  // The logits, and a copy of them for the sampler.
  const int64_t logits = 2 * shape.vocab * kFloatBytes;
  // The residual stream, norms and products of one layer. Layers of both kinds
  // use the same memory one after another.
  const int64_t rows =
      (4 * shape.hidden + 3 * std::max(shape.ffn, experts.shared_ffn)) *
          sizes.element_bytes +
      ExpertStepBytes(experts, shape.hidden, sizes.element_bytes) +
      std::max(2 * (shape.q_width + 2 * shape.kv_width) * sizes.element_bytes,
               DeltaStepBytes(sizes));
  return options.max_decode_sequences * (logits + rows);
}

absl::StatusOr<MemorySplit> PlanMemory(const ModelSizes& sizes,
                                       int64_t available_bytes,
                                       EngineOptions* options) {
  const CacheUnits units = CacheUnitsOf(sizes);
  WEFT_RETURN_IF_ERROR(CheckCacheBytes(units, *options));
  const int64_t context = options->max_context_tokens;
  const int64_t sequences = options->max_decode_sequences;
  const auto cache = [&](int64_t num_pages) {
    return BytesFor(units, num_pages, sequences);
  };
  const int64_t context_pages = KvPool::PagesFor(context);
  const int64_t usual_pages =
      KvPool::PagesFor(std::min(context, kUsualSequenceTokens));
  MemoryNeeds needs{
      .available = available_bytes,
      .adapter = LargestAdapterBytes(sizes, options->max_rank),
      .context = cache(context_pages),
      .usual_cache = cache(std::max(context_pages, usual_pages * sequences)),
      .most_cache = cache(context_pages * sequences),
      .decode_graphs = DecodeGraphBytes(sizes, *options),
      .most_adapters =
          std::min(kDefaultResidentAdapters, options->max_adapters),
      .wanted_adapters =
          std::min(options->max_resident_adapters, options->max_adapters),
      .wanted_cache = options->kv_cache_bytes,
      .wanted_activations = options->memory_budget_bytes};
  SetBatches(sizes, *options, needs);
  WEFT_ASSIGN_OR_RETURN(const MemorySplit split, SplitMemory(needs));
  options->max_resident_adapters = static_cast<int>(split.num_adapters);
  options->kv_cache_bytes = split.cache;
  options->memory_budget_bytes = split.activations;
  options->max_batch_tokens = split.batch_tokens;
  // Memory is given to all decode graphs or to none.
  if (split.decode_graphs == 0) options->decode_graphs = false;
  return split;
}

}  // namespace weft::engine
