#include "src/model_config/model_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/model_config/decoder_config.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"
#include "src/model_config/weight_list.h"
#include "src/weights/regular_file.h"
#include "src/weights/strict_json.h"

namespace weft::model_config {
namespace {

using Json = nlohmann::json;

constexpr weights::JsonLimits kConfigLimits = {.max_bytes = size_t{4} << 20,
                                               .max_depth = 8};

constexpr size_t kMaxEosTokens = 256;

// Fields about the model's origin, its initialisation, its training or how
// transformers runs it. They do not change what the decoder computes. auto_map
// names code beside the weights; transformers has its own for every family.
constexpr absl::string_view kBookkeepingFields[] = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "embd_pdrop",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "is_decoder",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_sequence_length",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache"};

// Fields of config.json with which old releases of transformers generate. They
// belong to generation_config.json, of which this server reads only the
// end-of-sequence tokens. A sampling request has its own settings.
constexpr absl::string_view kGenerationFields[] = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_p",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "penalty_alpha",
    "prefix",
    "repetition_penalty",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p"};

// Fields that describe how a model reads images. They are ignored, because this
// server accepts no images.
constexpr absl::string_view kImageFields[] = {
    "boi_token_id",          "boi_token_index",
    "eoi_token_id",          "eoi_token_index",
    "image_token_id",        "image_token_index",
    "mm_tokens_per_image",   "multimodal_projector_bias",
    "projector_hidden_act",  "spatial_merge_size",
    "video_token_id",        "vision_config",
    "vision_end_token_id",   "vision_feature_layer",
    "vision_start_token_id", "vision_token_id"};

// Adds the ids of the field eos_token_id to `ids`, without duplicates. `value`
// is a number, a list or null.
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

// Returns the fields that are ignored, with those of `more`.
std::vector<absl::string_view> IgnoredFields(
    absl::Span<const absl::string_view> more) {
  std::vector<absl::string_view> ignored(more.begin(), more.end());
  ignored.insert(ignored.end(), std::begin(kBookkeepingFields),
                 std::end(kBookkeepingFields));
  ignored.insert(ignored.end(), std::begin(kGenerationFields),
                 std::end(kGenerationFields));
  return ignored;
}

// Reads the decoder's fields. Ignores those of `ignored`.
absl::StatusOr<ModelConfig> ReadText(
    JsonFields& fields, const Family& family,
    absl::Span<const absl::string_view> ignored = {}) {
  WEFT_ASSIGN_OR_RETURN(ModelConfig config, ReadDecoder(fields, family));
  WEFT_RETURN_IF_ERROR(AddEosTokens(fields.Find("eos_token_id"), config.vocab,
                                    config.eos_token_ids));
  WEFT_RETURN_IF_ERROR(fields.Finish(IgnoredFields(ignored)));
  return config;
}

// Returns the family of text_config, which `wrappers` name.
absl::StatusOr<const Family*> TextFamily(JsonFields& text,
                                         const std::vector<Wrapper>& wrappers) {
  WEFT_ASSIGN_OR_RETURN(
      const std::string model_type,
      text.StringOr("model_type",
                    std::string(wrappers.front().text_model_type)));
  std::vector<std::string> known;
  for (const Wrapper& wrapper : wrappers) {
    if (model_type == wrapper.text_model_type) return FindFamily(model_type);
    known.push_back(absl::StrCat("\"", wrapper.text_model_type, "\""));
  }
  return UnsupportedField("text_config.model_type", Json(model_type),
                          absl::StrJoin(known, ", "));
}

// Checks that the fields of text_config which `outer` repeats have the same
// values. transformers 4.52 to 4.56 write both; transformers 5 reads those of
// text_config alone. Fields that each place has for itself may differ, and so
// may those that text_config leaves null.
absl::Status CheckRepeatedFields(JsonFields& outer, const Json& text) {
  std::vector<absl::string_view> own = IgnoredFields(kImageFields);
  own.insert(own.end(), {"model_type", "tie_word_embeddings", "eos_token_id"});
  for (const auto& [name, value] : text.items()) {
    const Json* repeated = outer.Find(name.c_str());
    if (repeated == nullptr || value.is_null() || *repeated == value ||
        std::ranges::find(own, name) != own.end()) {
      continue;
    }
    return UnsupportedField(
        name, *repeated,
        absl::StrCat("the same as text_config says, ", value.dump()));
  }
  return absl::OkStatus();
}

// Reads a model whose decoder is described in text_config. The model's other
// parts are not served. Old files of some models have the decoder's fields
// beside vision_config. If tie_word_embeddings is inside and outside of
// text_config, transformers 5 reads the outer one, except for models that may
// be flat.
absl::StatusOr<ModelConfig> ReadWrapped(JsonFields& outer,
                                        const std::string& model_type,
                                        const std::vector<Wrapper>& wrappers) {
  const Json* text = outer.Find("text_config");
  if (text == nullptr && wrappers.front().may_be_flat) {
    const Family& family = *FindFamily(wrappers.front().text_model_type);
    WEFT_ASSIGN_OR_RETURN(ModelConfig config,
                          ReadText(outer, family, kImageFields));
    config.model_type = model_type;
    config.is_wrapped = config.has_wrapper = true;
    return config;
  }
  if (text == nullptr || !text->is_object()) {
    return absl::InvalidArgumentError(FieldMessage(
        "text_config", text == nullptr ? Json() : *text, "an object"));
  }
  JsonFields fields(*text);
  WEFT_ASSIGN_OR_RETURN(const Family* family, TextFamily(fields, wrappers));
  absl::StatusOr<ModelConfig> config = ReadText(fields, *family, kImageFields);
  if (!config.ok()) return weights::InFile("text_config", config.status());
  config->model_type = model_type;
  config->is_wrapped = !wrappers.front().loads_text;
  config->has_wrapper = true;
  const bool inner_tied = config->tied_embeddings;
  WEFT_ASSIGN_OR_RETURN(config->tied_embeddings,
                        outer.BoolOr("tie_word_embeddings", inner_tied));
  if (wrappers.front().may_be_flat) {
    config->tied_embeddings |= inner_tied;
    WEFT_RETURN_IF_ERROR(CheckRepeatedFields(outer, *text));
  }
  WEFT_RETURN_IF_ERROR(AddEosTokens(outer.Find("eos_token_id"), config->vocab,
                                    config->eos_token_ids));
  WEFT_RETURN_IF_ERROR(outer.Finish(IgnoredFields(kImageFields)));
  return config;
}

}  // namespace

ModelShape ModelConfig::shape() const {
  return {.num_layers = num_layers,
          .hidden = hidden,
          .q_width = int64_t{num_heads} * head_dim,
          .gate_width = output_gate ? int64_t{num_heads} * head_dim : 0,
          .kv_width = int64_t{num_kv_heads} * head_dim,
          .ffn = ffn,
          .vocab = vocab,
          .experts = moe.shape,
          .delta = delta,
          .names = is_wrapped ? DecoderNames::kWrapped : DecoderNames::kPlain,
          .wrapper_names =
              has_wrapper ? DecoderNames::kWrapped : DecoderNames::kPlain,
          .head_order = head_order,
          .fused_qkv = fused_qkv,
          .fused_gate_up = fused_gate_up};
}

uint64_t ModelConfig::num_parameters() const {
  uint64_t sum = 0;
  for (const WeightEntry& entry : ListWeights(*this)) {
    sum += static_cast<uint64_t>(entry.num_elements());
  }
  return sum;
}

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json) {
  WEFT_ASSIGN_OR_RETURN(
      const Json root,
      weights::ParseStrictJson(
          absl::string_view(config_json.data(), config_json.size()),
          "model config", kConfigLimits));
  JsonFields fields(root);
  WEFT_ASSIGN_OR_RETURN(const std::string model_type,
                        fields.String("model_type"));
  if (const std::vector<Wrapper> wrappers = FindWrappers(model_type);
      !wrappers.empty()) {
    return ReadWrapped(fields, model_type, wrappers);
  }
  const Family* family = FindFamily(model_type);
  if (family == nullptr) {
    return UnsupportedField("model_type", Json(model_type), KnownFamilies());
  }
  return ReadText(fields, *family);
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& model_dir) {
  const std::string path = absl::StrCat(model_dir, "/config.json");
  WEFT_ASSIGN_OR_RETURN(const std::string text,
                        weights::ReadSmallFile(path, kConfigLimits.max_bytes));
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  if (!config.ok()) return weights::InFile(path, config.status());

  const std::string generation_path =
      absl::StrCat(model_dir, "/generation_config.json");
  const auto generation =
      weights::ReadSmallFile(generation_path, kConfigLimits.max_bytes);
  if (absl::IsNotFound(generation.status())) return config;
  if (!generation.ok()) return generation.status();
  if (const absl::Status added = AddGenerationConfig(*generation, *config);
      !added.ok()) {
    return weights::InFile(generation_path, added);
  }
  return config;
}

}  // namespace weft::model_config
