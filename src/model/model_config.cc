#include "src/model/model_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/model/json_fields.h"
#include "src/model/rope_config.h"
#include "src/weights/strict_json.h"

namespace weft::model {
namespace {

using Json = nlohmann::json;

constexpr weights::JsonLimits kConfigLimits = {.max_bytes = size_t{4} << 20,
                                               .max_depth = 8};

// Above every published model; small enough that no product of them overflows.
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHidden = 1 << 17;
constexpr int64_t kMaxFfn = 1 << 20;
constexpr int64_t kMaxVocab = 1 << 22;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxPositions = 1 << 28;
constexpr double kMaxNormEps = 0.1;
constexpr size_t kMaxEosTokens = 256;

// Fields that say who wrote the model, how it was initialised or how a program
// of transformers runs it. None changes what the decoder computes.
constexpr absl::string_view kBookkeepingFields[] = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
};

absl::Status Unsupported(absl::string_view field, const Json& value,
                         absl::string_view accepted) {
  return absl::UnimplementedError(FieldMessage(field, value, accepted));
}

absl::Status ReadSizes(JsonFields& fields, ModelConfig& config) {
  WEFT_ASSIGN_OR_RETURN(const int64_t layers,
                        fields.Int("num_hidden_layers", 1, kMaxLayers));
  WEFT_ASSIGN_OR_RETURN(config.hidden,
                        fields.Int("hidden_size", 1, kMaxHidden));
  WEFT_ASSIGN_OR_RETURN(config.ffn,
                        fields.Int("intermediate_size", 1, kMaxFfn));
  WEFT_ASSIGN_OR_RETURN(config.vocab, fields.Int("vocab_size", 1, kMaxVocab));
  WEFT_ASSIGN_OR_RETURN(
      config.max_positions,
      fields.Int("max_position_embeddings", 1, kMaxPositions));
  WEFT_ASSIGN_OR_RETURN(
      config.rms_norm_eps,
      fields.NumberOr("rms_norm_eps", 1e-12, kMaxNormEps, 1e-6));
  config.num_layers = static_cast<int>(layers);
  return absl::OkStatus();
}

absl::Status ReadHeads(JsonFields& fields, ModelConfig& config) {
  WEFT_ASSIGN_OR_RETURN(const int64_t heads,
                        fields.Int("num_attention_heads", 1, kMaxHeads));
  WEFT_ASSIGN_OR_RETURN(
      const int64_t kv_heads,
      fields.IntOr("num_key_value_heads", 1, kMaxHeads, heads));
  if (heads % kv_heads != 0) {
    return absl::InvalidArgumentError(FieldMessage(
        "num_key_value_heads", Json(kv_heads),
        absl::StrCat("a divisor of num_attention_heads = ", heads)));
  }
  constexpr int64_t kQwen3HeadDim = 128;
  const bool derived =
      config.model_type == "llama" && fields.Find("head_dim") == nullptr;
  if (derived && config.hidden % heads != 0) {
    return absl::InvalidArgumentError(FieldMessage(
        "hidden_size", Json(config.hidden),
        absl::StrCat("a multiple of num_attention_heads = ", heads)));
  }
  WEFT_ASSIGN_OR_RETURN(
      const int64_t head_dim,
      fields.IntOr("head_dim", 2, kMaxHeadDim,
                   derived ? config.hidden / heads : kQwen3HeadDim));
  if (head_dim % 2 != 0 || head_dim > kMaxHeadDim) {
    return absl::InvalidArgumentError(
        FieldMessage("head_dim", Json(head_dim),
                     absl::StrCat("an even number in [2, ", kMaxHeadDim, "]")));
  }
  config.num_heads = static_cast<int>(heads);
  config.num_kv_heads = static_cast<int>(kv_heads);
  config.head_dim = static_cast<int>(head_dim);
  return absl::OkStatus();
}

absl::Status ReadSwitches(JsonFields& fields, ModelConfig& config) {
  config.qk_norm = config.model_type == "qwen3";
  WEFT_ASSIGN_OR_RETURN(config.tied_embeddings,
                        fields.BoolOr("tie_word_embeddings", false));
  WEFT_ASSIGN_OR_RETURN(config.attention_bias,
                        fields.BoolOr("attention_bias", false));
  WEFT_ASSIGN_OR_RETURN(config.mlp_bias, fields.BoolOr("mlp_bias", false));
  if (config.mlp_bias && config.model_type != "llama") {
    return Unsupported("mlp_bias", Json(true),
                       absl::StrCat("false for ", config.model_type));
  }
  return absl::OkStatus();
}

// Attention that sees only part of the past is not built.
absl::Status CheckFullAttention(JsonFields& fields, const ModelConfig& config) {
  constexpr int64_t kQwen3FirstSlidingLayer = 28;
  WEFT_ASSIGN_OR_RETURN(const int64_t window,
                        fields.IntOr("sliding_window", 0, kMaxPositions, 0));
  WEFT_ASSIGN_OR_RETURN(const int64_t first_sliding_layer,
                        fields.IntOr("max_window_layers", 0, kMaxPositions,
                                     kQwen3FirstSlidingLayer));
  // Llama has no such switch: there the window itself would be meant.
  WEFT_ASSIGN_OR_RETURN(
      const bool use_window,
      fields.BoolOr("use_sliding_window", config.model_type != "qwen3"));
  if (const Json* types = fields.Find("layer_types"); types != nullptr) {
    if (!types->is_array() ||
        types->size() != static_cast<size_t>(config.num_layers)) {
      return absl::InvalidArgumentError(
          FieldMessage("layer_types", *types,
                       absl::StrCat("a list of ", config.num_layers)));
    }
    for (const Json& type : *types) {
      if (type != "full_attention") {
        return Unsupported("layer_types entry", type, "\"full_attention\"");
      }
    }
    return absl::OkStatus();
  }
  const bool some_layer_slides =
      config.model_type != "qwen3" || first_sliding_layer < config.num_layers;
  if (use_window && window > 0 && some_layer_slides) {
    return Unsupported("sliding_window", Json(window),
                       "null, or use_sliding_window false");
  }
  return absl::OkStatus();
}

// Fields that may be there only with the value that changes nothing.
absl::Status CheckInertFields(JsonFields& fields) {
  WEFT_ASSIGN_OR_RETURN(const std::string activation,
                        fields.StringOr("hidden_act", "silu"));
  if (activation != "silu" && activation != "swish") {
    return Unsupported("hidden_act", Json(activation), "\"silu\"");
  }
  WEFT_ASSIGN_OR_RETURN(const double dropout,
                        fields.NumberOr("attention_dropout", 0, 1, 0));
  if (dropout != 0) return Unsupported("attention_dropout", Json(dropout), "0");
  WEFT_ASSIGN_OR_RETURN(const bool interleaved,
                        fields.BoolOr("rope_interleaved", false));
  if (interleaved) return Unsupported("rope_interleaved", Json(true), "false");
  WEFT_ASSIGN_OR_RETURN(const bool bidirectional,
                        fields.BoolOr("is_encoder_decoder", false));
  if (bidirectional) {
    return Unsupported("is_encoder_decoder", Json(true), "false");
  }
  return absl::OkStatus();
}

// eos_token_id is a number, a list or null. Adds to `ids` what is not there.
absl::Status AddEosTokens(const Json* value, int64_t vocab,
                          std::vector<int32_t>& ids) {
  if (value == nullptr || value->is_null()) return absl::OkStatus();
  const Json list = value->is_array() ? *value : Json::array({*value});
  for (const Json& entry : list) {
    if (!entry.is_number_unsigned() ||
        entry.get<uint64_t>() >= static_cast<uint64_t>(vocab)) {
      return absl::InvalidArgumentError(
          FieldMessage("eos_token_id", entry,
                       absl::StrCat("token ids in [0, ", vocab, ")")));
    }
    const auto id = entry.get<int32_t>();
    if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
    if (ids.size() > kMaxEosTokens) {
      return absl::InvalidArgumentError(absl::StrCat(
          "eos_token_id has more than ", kMaxEosTokens, " tokens"));
    }
  }
  return absl::OkStatus();
}

absl::Status AddGenerationConfig(absl::string_view json, ModelConfig& config) {
  WEFT_ASSIGN_OR_RETURN(
      const Json root,
      weights::ParseStrictJson(json, "generation config", kConfigLimits));
  const auto eos = root.find("eos_token_id");
  return AddEosTokens(eos == root.end() ? nullptr : &*eos, config.vocab,
                      config.eos_token_ids);
}

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(path, ": ", status.message()));
}

}  // namespace

lora::ModelShape ModelConfig::shape() const {
  return {.num_layers = num_layers,
          .hidden = hidden,
          .q_width = int64_t{num_heads} * head_dim,
          .kv_width = int64_t{num_kv_heads} * head_dim,
          .ffn = ffn,
          .vocab = vocab};
}

uint64_t ModelConfig::num_parameters() const {
  const auto [layers, h, q, kv, f, v] = shape();
  int64_t layer = 2 * q * h + 2 * kv * h + 3 * f * h + 2 * h;
  if (qk_norm) layer += 2 * head_dim;
  if (attention_bias) layer += q + 2 * kv + h;
  if (mlp_bias) layer += 2 * f + h;
  const int64_t embeddings = (tied_embeddings ? 1 : 2) * v * h;
  return static_cast<uint64_t>(layers * layer + embeddings + h);
}

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json) {
  WEFT_ASSIGN_OR_RETURN(
      const Json root,
      weights::ParseStrictJson(
          absl::string_view(config_json.data(), config_json.size()),
          "model config", kConfigLimits));
  JsonFields fields(root);
  ModelConfig config;
  WEFT_ASSIGN_OR_RETURN(config.model_type, fields.String("model_type"));
  if (config.model_type != "llama" && config.model_type != "qwen3") {
    return Unsupported("model_type", Json(config.model_type),
                       "\"llama\", \"qwen3\"");
  }
  WEFT_RETURN_IF_ERROR(ReadSizes(fields, config));
  WEFT_RETURN_IF_ERROR(ReadHeads(fields, config));
  WEFT_RETURN_IF_ERROR(ReadSwitches(fields, config));
  WEFT_RETURN_IF_ERROR(CheckFullAttention(fields, config));
  WEFT_RETURN_IF_ERROR(CheckInertFields(fields));
  WEFT_ASSIGN_OR_RETURN(config.inverse_frequencies,
                        ReadInverseFrequencies(fields, config.head_dim));
  WEFT_RETURN_IF_ERROR(AddEosTokens(fields.Find("eos_token_id"), config.vocab,
                                    config.eos_token_ids));
  WEFT_RETURN_IF_ERROR(fields.Finish(kBookkeepingFields));
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& model_dir) {
  const std::string path = absl::StrCat(model_dir, "/config.json");
  WEFT_ASSIGN_OR_RETURN(const std::string text,
                        weights::ReadSmallFile(path, kConfigLimits.max_bytes));
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  if (!config.ok()) return InFile(path, config.status());

  const std::string generation_path =
      absl::StrCat(model_dir, "/generation_config.json");
  const auto generation =
      weights::ReadSmallFile(generation_path, kConfigLimits.max_bytes);
  if (absl::IsNotFound(generation.status())) return config;
  if (!generation.ok()) return generation.status();
  if (const absl::Status added = AddGenerationConfig(*generation, *config);
      !added.ok()) {
    return InFile(generation_path, added);
  }
  return config;
}

}  // namespace weft::model
