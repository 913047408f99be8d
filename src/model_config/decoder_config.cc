#include "src/model_config/decoder_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/model_config/attention_config.h"
#include "src/model_config/delta_config.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"
#include "src/model_config/model_config.h"
#include "src/model_config/rope_config.h"

namespace weft::model_config {
namespace {

using Json = nlohmann::json;

// These limits are above the sizes of published models. They are small enough
// that the number of weights fits in int64.
constexpr int64_t kMaxHidden = 1 << 17;
constexpr int64_t kMaxFfn = 1 << 20;
constexpr int64_t kMaxVocab = 1 << 22;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxHeadDim = 1024;
constexpr double kMaxNormEps = 0.1;
constexpr double kMinSoftcap = 1e-6;
constexpr int64_t kMaxExperts = 4096;
constexpr int64_t kMaxExpertFfn = 1 << 20;
constexpr int64_t kMaxContext = 1 << 28;
constexpr double kMaxCoefficient = 1e6;
constexpr double kMinMultiplier = 1e-4;

// Reads num_experts or num_local_experts: transformers 4 and 5 have different
// names for this field. GLM's files have n_routed_experts.
absl::StatusOr<int64_t> ReadNumExperts(JsonFields& fields,
                                       const Family& family) {
  if (family.experts == ExpertFields::kGlm) {
    return fields.IntOr("n_routed_experts", 1, kMaxExperts,
                        family.sizes.experts);
  }
  WEFT_ASSIGN_OR_RETURN(const int64_t count,
                        fields.IntOr("num_experts", 1, kMaxExperts,
                                     fields.Find("num_local_experts") == nullptr
                                         ? family.sizes.experts
                                         : 0));
  WEFT_ASSIGN_OR_RETURN(const int64_t same, fields.IntOr("num_local_experts", 1,
                                                         kMaxExperts, count));
  if (count != 0 && same != count) {
    return absl::InvalidArgumentError(
        FieldMessage("num_local_experts", Json(same),
                     absl::StrCat("the same as num_experts = ", count)));
  }
  return same;
}

// Returns which layers have experts.
absl::StatusOr<std::vector<bool>> ReadSparseLayers(JsonFields& fields,
                                                   int num_layers) {
  WEFT_ASSIGN_OR_RETURN(const int64_t step,
                        fields.IntOr("decoder_sparse_step", 1, num_layers, 1));
  std::vector<bool> layers(num_layers);
  for (int i = 0; i < num_layers; ++i) layers[i] = (i + 1) % step == 0;
  const Json* dense = fields.Find("mlp_only_layers");
  if (dense == nullptr) return layers;
  if (!dense->is_array()) {
    return absl::InvalidArgumentError(
        FieldMessage("mlp_only_layers", *dense, "a list of layers"));
  }
  for (const Json& layer : *dense) {
    if (!layer.is_number_unsigned() ||
        layer.get<uint64_t>() >= static_cast<uint64_t>(num_layers)) {
      return absl::InvalidArgumentError(
          FieldMessage("mlp_only_layers entry", layer,
                       absl::StrCat("layers in [0, ", num_layers, ")")));
    }
    layers[layer.get<uint64_t>()] = false;
  }
  return layers;
}

absl::Status ReadQwen(JsonFields& fields, const Family& family,
                      ModelConfig& config) {
  MoeConfig& moe = config.moe;
  WEFT_ASSIGN_OR_RETURN(moe.shape.ffn,
                        fields.IntOr("moe_intermediate_size", 1, kMaxExpertFfn,
                                     family.sizes.expert_ffn));
  if (family.sizes.shared_ffn > 0) {
    WEFT_ASSIGN_OR_RETURN(moe.shape.shared_ffn,
                          fields.IntOr("shared_expert_intermediate_size", 1,
                                       kMaxExpertFfn, family.sizes.shared_ffn));
  }
  if (family.attention_bias == AttentionBias::kQkv) {
    WEFT_ASSIGN_OR_RETURN(config.qkv_bias, fields.BoolOr("qkv_bias", true));
  }
  WEFT_ASSIGN_OR_RETURN(
      moe.normalizes_weights,
      fields.BoolOr("norm_topk_prob",
                    family.expert_norm != ExpertNorm::kField));
  if (family.expert_norm == ExpertNorm::kAlways && !moe.normalizes_weights) {
    return UnsupportedField("norm_topk_prob", Json(false),
                            absl::StrCat("true for ", family.model_type));
  }
  WEFT_ASSIGN_OR_RETURN(moe.shape.layers,
                        ReadSparseLayers(fields, config.num_layers));
  return absl::OkStatus();
}

// Reads Qwen3-VL's experts. Refuses layers without experts, because PEFT names
// a layer's MLP in another way than fused experts.
absl::Status ReadQwenVl(JsonFields& fields, const Family& family,
                        ModelConfig& config) {
  ExpertShape& experts = config.moe.shape;
  experts.names = ExpertNames::kFusedHalves;
  WEFT_RETURN_IF_ERROR(ReadQwen(fields, family, config));
  if (std::ranges::find(experts.layers, false) == experts.layers.end()) {
    return absl::OkStatus();
  }
  const Json* step = fields.Find("decoder_sparse_step");
  const bool is_step = step != nullptr && *step != 1;
  return UnsupportedField(
      is_step ? "decoder_sparse_step" : "mlp_only_layers",
      is_step ? *step : *fields.Find("mlp_only_layers"),
      absl::StrCat("experts in every layer for ", family.model_type));
}

// Gives every layer experts with intermediate_size features.
void PutInEveryLayer(ExpertNames names, ModelConfig& config) {
  ExpertShape& experts = config.moe.shape;
  experts.ffn = config.ffn;
  experts.names = names;
  experts.layers.assign(config.num_layers, true);
}

absl::Status ReadMixtral(JsonFields& fields, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  PutInEveryLayer(ExpertNames::kMixtral, config);
  moe.normalizes_weights = true;
  return fields.Only("router_jitter_noise", 0.0);
}

absl::Status ReadGptOss(JsonFields& fields, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  PutInEveryLayer(ExpertNames::kFused, config);
  moe.softmax_of_chosen = true;
  // config.json says silu, but the model computes a clamped silu.
  if (config.activation != ops::Activation::kSilu) {
    return UnsupportedField("hidden_act", Json("gelu_pytorch_tanh"),
                            "\"silu\" for gpt_oss");
  }
  config.activation = ops::Activation::kClampedSilu;
  WEFT_RETURN_IF_ERROR(fields.Only("swiglu_limit", ops::kClampedSiluLimit));
  // Ignores initial_context_length. Published files also have rope_scaling,
  // which gives the same length.
  WEFT_RETURN_IF_ERROR(
      fields.IntOr("initial_context_length", 1, kMaxContext, 1).status());
  WEFT_RETURN_IF_ERROR(fields.Same("experts_per_token", moe.shape.per_token,
                                   "num_experts_per_tok"));
  const Json* quantization = fields.Find("quantization_config");
  if (quantization != nullptr &&
      (!quantization->is_object() ||
       quantization->value("quant_method", Json()) != "mxfp4")) {
    return UnsupportedField("quantization_config", *quantization,
                            "quant_method \"mxfp4\", or null");
  }
  return absl::OkStatus();
}

// Reads scoring_func, the name in files of the function of a router that takes
// sigmoids. Sets the flags of such a router.
absl::Status ReadSigmoidRouter(JsonFields& fields, MoeConfig& moe) {
  moe.sigmoid = true;
  moe.has_shared_gate = false;
  WEFT_RETURN_IF_ERROR(fields.Only("scoring_func", "sigmoid"));
  return fields.Only("topk_method", "noaux_tc");
}

// Reads how many groups of experts there are, and how many a token may use.
absl::Status ReadGroups(JsonFields& fields, MoeConfig& moe) {
  WEFT_ASSIGN_OR_RETURN(const int64_t groups,
                        fields.IntOr("n_group", 1, moe.shape.count, 1));
  WEFT_ASSIGN_OR_RETURN(const int64_t chosen,
                        fields.IntOr("topk_group", 1, groups, 1));
  const int64_t size = moe.shape.count / groups;
  if (moe.shape.count % groups != 0 || (groups > 1 && size < 2)) {
    return absl::InvalidArgumentError(FieldMessage(
        "n_group", Json(groups),
        absl::StrCat("a divisor of n_routed_experts = ", moe.shape.count,
                     " that leaves at least 2 experts in a group")));
  }
  if (chosen * size < moe.shape.per_token) {
    return absl::InvalidArgumentError(FieldMessage(
        "topk_group", Json(chosen),
        absl::StrCat(
            "enough groups of ", size,
            " experts for num_experts_per_tok = ", moe.shape.per_token)));
  }
  moe.groups = static_cast<int>(groups);
  moe.chosen_groups = static_cast<int>(chosen);
  return absl::OkStatus();
}

absl::Status ReadGlm(JsonFields& fields, const Family& family,
                     ModelConfig& config) {
  MoeConfig& moe = config.moe;
  moe.shape.names = ExpertNames::kGlm;
  moe.wide_logits = true;
  moe.sum_epsilon = 1e-20;
  WEFT_RETURN_IF_ERROR(ReadSigmoidRouter(fields, moe));
  WEFT_RETURN_IF_ERROR(ReadGroups(fields, moe));
  WEFT_ASSIGN_OR_RETURN(moe.shape.ffn,
                        fields.IntOr("moe_intermediate_size", 1, kMaxExpertFfn,
                                     family.sizes.expert_ffn));
  WEFT_ASSIGN_OR_RETURN(const int64_t shared,
                        fields.IntOr("n_shared_experts", 0, kMaxExperts, 1));
  moe.shape.shared_ffn = shared * moe.shape.ffn;
  WEFT_ASSIGN_OR_RETURN(moe.weight_scale,
                        fields.NumberOr("routed_scaling_factor", kMinMultiplier,
                                        kMaxCoefficient, 1));
  WEFT_ASSIGN_OR_RETURN(moe.normalizes_weights,
                        fields.BoolOr("norm_topk_prob", true));
  WEFT_ASSIGN_OR_RETURN(const bool has_norms,
                        fields.BoolOr("use_qk_norm", false));
  if (has_norms) config.qk_norm = QkNorm::kHead;
  WEFT_ASSIGN_OR_RETURN(
      const int64_t dense,
      fields.IntOr("first_k_dense_replace", 0, config.num_layers, 1));
  moe.shape.layers.assign(config.num_layers, true);
  std::fill_n(moe.shape.layers.begin(), dense, false);
  // Layers that predict further tokens follow the decoder's, and are not read.
  WEFT_RETURN_IF_ERROR(
      fields.IntOr("num_nextn_predict_layers", 0, kMaxLayers, 0).status());
  return fields.IntOr("num_mtp_layers", 0, kMaxLayers, 0).status();
}

// Checks what MiniMax's own files say about the model.
absl::Status CheckMiniMax(JsonFields& fields) {
  WEFT_RETURN_IF_ERROR(fields.Only("use_routing_bias", true));
  WEFT_RETURN_IF_ERROR(fields.Only("qk_norm_type", "per_layer"));
  // The sizes of layers that this release does not have, and how it would add
  // a shared expert.
  WEFT_RETURN_IF_ERROR(
      fields.IntOr("mlp_intermediate_size", 0, kMaxFfn, 0).status());
  WEFT_RETURN_IF_ERROR(fields.StringOr("shared_moe_mode", "").status());
  const Json* types = fields.Find("attn_type_list");
  if (types != nullptr &&
      !(types->is_array() && std::ranges::all_of(*types, [](const Json& type) {
          return type == 1;
        }))) {
    return UnsupportedField("attn_type_list", *types, "a list of 1");
  }
  // Modules that predict further tokens are not read.
  WEFT_RETURN_IF_ERROR(fields.BoolOr("use_mtp", false).status());
  for (const char* name : {"num_mtp_modules", "mtp_transformer_layers"}) {
    WEFT_RETURN_IF_ERROR(fields.IntOr(name, 0, kMaxLayers, 0).status());
  }
  return absl::OkStatus();
}

absl::Status ReadMiniMax(JsonFields& fields, ModelConfig& config) {
  WEFT_RETURN_IF_ERROR(CheckMiniMax(fields));
  WEFT_RETURN_IF_ERROR(ReadSigmoidRouter(fields, config.moe));
  return ReadMixtral(fields, config);
}

// Fills config.moe. May also set qkv_bias (Qwen2-MoE), qk_norm (GLM-4.5) and
// the activation (gpt-oss). Does nothing for a family without experts.
// REQUIRES: sizes, biases and activation of `config` are read. Errors: those of
// ParseModelConfig.
absl::Status ReadMoe(JsonFields& fields, const Family& family,
                     ModelConfig& config) {
  if (family.experts == ExpertFields::kNone) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const int64_t count, ReadNumExperts(fields, family));
  config.moe.shape.count = static_cast<int>(count);
  WEFT_ASSIGN_OR_RETURN(const int64_t per_token,
                        fields.IntOr("num_experts_per_tok", 1, kMaxExperts,
                                     family.sizes.experts_per_token));
  if (per_token > count) {
    return absl::InvalidArgumentError(
        FieldMessage("num_experts_per_tok", Json(per_token),
                     absl::StrCat("at most num_experts = ", count)));
  }
  config.moe.shape.per_token = static_cast<int>(per_token);
  // The router does not learn, so its auxiliary loss has no effect.
  WEFT_RETURN_IF_ERROR(
      fields.NumberOr("router_aux_loss_coef", 0, kMaxCoefficient, 0).status());
  WEFT_RETURN_IF_ERROR(fields.BoolOr("output_router_logits", false).status());
  switch (family.experts) {
    case ExpertFields::kQwenVl:
      return ReadQwenVl(fields, family, config);
    case ExpertFields::kMixtral:
      return ReadMixtral(fields, config);
    case ExpertFields::kGptOss:
      return ReadGptOss(fields, config);
    case ExpertFields::kGlm:
      return ReadGlm(fields, family, config);
    case ExpertFields::kMiniMax:
      return ReadMiniMax(fields, config);
    default:
      return ReadQwen(fields, family, config);
  }
}

// Returns the field's value, or `fallback` if the field is absent. A `fallback`
// of 0 makes the field required.
absl::StatusOr<int64_t> SizeOf(JsonFields& fields, const char* name,
                               int64_t max, int64_t fallback) {
  if (fallback == 0) return fields.Int(name, 1, max);
  return fields.IntOr(name, 1, max, fallback);
}

absl::Status ReadSizes(JsonFields& fields, const Family& family,
                       ModelConfig& config) {
  const DefaultSizes& sizes = family.sizes;
  WEFT_ASSIGN_OR_RETURN(
      const int64_t layers,
      SizeOf(fields, "num_hidden_layers", kMaxLayers, sizes.layers));
  WEFT_ASSIGN_OR_RETURN(
      config.hidden, SizeOf(fields, "hidden_size", kMaxHidden, sizes.hidden));
  WEFT_ASSIGN_OR_RETURN(
      config.ffn, SizeOf(fields, "intermediate_size", kMaxFfn, sizes.ffn));
  WEFT_ASSIGN_OR_RETURN(config.vocab,
                        SizeOf(fields, "vocab_size", kMaxVocab, sizes.vocab));
  WEFT_ASSIGN_OR_RETURN(config.max_positions,
                        SizeOf(fields, "max_position_embeddings", kMaxPositions,
                               sizes.positions));
  WEFT_ASSIGN_OR_RETURN(
      config.rms_norm_eps,
      fields.NumberOr("rms_norm_eps", 1e-12, kMaxNormEps, family.rms_norm_eps));
  config.num_layers = static_cast<int>(layers);
  return absl::OkStatus();
}

absl::Status ReadHeads(JsonFields& fields, const DefaultSizes& sizes,
                       ModelConfig& config) {
  WEFT_ASSIGN_OR_RETURN(
      const int64_t heads,
      SizeOf(fields, "num_attention_heads", kMaxHeads, sizes.heads));
  WEFT_ASSIGN_OR_RETURN(
      const int64_t kv_heads,
      fields.IntOr("num_key_value_heads", 1, kMaxHeads,
                   sizes.kv_heads > 0 && !fields.IsNull("num_key_value_heads")
                       ? sizes.kv_heads
                       : heads));
  if (heads % kv_heads != 0) {
    return absl::InvalidArgumentError(FieldMessage(
        "num_key_value_heads", Json(kv_heads),
        absl::StrCat("a divisor of num_attention_heads = ", heads)));
  }
  const bool derived =
      sizes.head_dim == 0 && fields.Find("head_dim") == nullptr;
  if (derived && config.hidden % heads != 0) {
    return absl::InvalidArgumentError(FieldMessage(
        "hidden_size", Json(config.hidden),
        absl::StrCat("a multiple of num_attention_heads = ", heads)));
  }
  WEFT_ASSIGN_OR_RETURN(
      const int64_t head_dim,
      fields.IntOr("head_dim", 2, kMaxHeadDim,
                   derived ? config.hidden / heads : sizes.head_dim));
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

absl::Status ReadBiases(JsonFields& fields, const Family& family,
                        ModelConfig& config) {
  using enum AttentionBias;
  const AttentionBias kind = family.attention_bias;
  WEFT_ASSIGN_OR_RETURN(
      const bool attention,
      fields.BoolOr("attention_bias", kind == kFieldOn || kind == kQkvFieldOn));
  if (attention && (kind == kNone || kind == kQkv)) {
    return UnsupportedField("attention_bias", Json(true),
                            absl::StrCat("false for ", family.model_type));
  }
  config.qkv_bias = attention || kind == kQkv;
  config.o_bias = attention && (kind == kField || kind == kFieldOn);
  if (family.out_bias_field) {
    WEFT_ASSIGN_OR_RETURN(config.o_bias,
                          fields.BoolOr("attention_out_bias", false));
  }
  WEFT_ASSIGN_OR_RETURN(config.mlp_bias, fields.BoolOr("mlp_bias", false));
  if (config.mlp_bias && !family.mlp_bias_field) {
    return UnsupportedField("mlp_bias", Json(true),
                            absl::StrCat("false for ", family.model_type));
  }
  return absl::OkStatus();
}

absl::StatusOr<ops::Activation> ActivationOf(const char* field,
                                             const std::string& name) {
  if (name == "silu" || name == "swish") return ops::Activation::kSilu;
  if (name == "gelu_pytorch_tanh") return ops::Activation::kGeluTanh;
  return UnsupportedField(field, Json(name), "\"silu\", \"gelu_pytorch_tanh\"");
}

absl::Status ReadActivation(JsonFields& fields, const Family& family,
                            ModelConfig& config) {
  const char* field = family.gemma ? "hidden_activation" : "hidden_act";
  WEFT_ASSIGN_OR_RETURN(
      const std::string name,
      fields.StringOr(field, family.gemma ? "gelu_pytorch_tanh" : "silu"));
  WEFT_ASSIGN_OR_RETURN(config.activation, ActivationOf(field, name));
  // Gemma's files may also have hidden_act. transformers does not read this
  // field for Gemma, so the value "gelu" is accepted there.
  WEFT_ASSIGN_OR_RETURN(const std::string other,
                        fields.StringOr("hidden_act", name));
  if (other != name && !(family.gemma && other == "gelu")) {
    return UnsupportedField("hidden_act", Json(other), "the same as " + name);
  }
  return absl::OkStatus();
}

// Reads pad_token_id. A number outside the vocabulary is no row of the
// embedding, except that one below 0 counts from the end, as in PyTorch.
absl::Status ReadPadding(JsonFields& fields, const Family& family,
                         ModelConfig& config) {
  const int64_t usual =
      fields.IsNull("pad_token_id") ? -1 : family.padding_token;
  WEFT_ASSIGN_OR_RETURN(int64_t token, fields.IntOr("pad_token_id", -kMaxVocab,
                                                    kMaxVocab, usual));
  if (token < 0 && fields.Find("pad_token_id") != nullptr) {
    token += config.vocab;
  }
  config.padding_token =
      token < config.vocab ? std::max<int64_t>(token, -1) : -1;
  return absl::OkStatus();
}

absl::Status ReadHead(JsonFields& fields, const Family& family,
                      ModelConfig& config) {
  WEFT_ASSIGN_OR_RETURN(config.tied_embeddings,
                        fields.BoolOr("tie_word_embeddings", family.tied));
  if (family.softcap_fields && !fields.IsNull("final_logit_softcapping")) {
    WEFT_ASSIGN_OR_RETURN(
        config.final_softcap,
        fields.NumberOr("final_logit_softcapping", kMinSoftcap, kMaxSoftcap,
                        family.final_softcap));
  }
  return absl::OkStatus();
}

// Reads the factors of Granite. The decoder has no factor of what a layer adds
// to the residual stream: it divides the whole stream by residual_multiplier,
// which changes nothing beside the norms' epsilon, because norms divide by the
// stream's size.
absl::Status ReadMultipliers(JsonFields& fields, const Family& family,
                             ModelConfig& config) {
  if (!family.multipliers) return absl::OkStatus();
  const auto read = [&](const char* name) {
    return fields.NumberOr(name, kMinMultiplier, kMaxCoefficient, 1);
  };
  WEFT_ASSIGN_OR_RETURN(const double embedding, read("embedding_multiplier"));
  WEFT_ASSIGN_OR_RETURN(const double residual, read("residual_multiplier"));
  WEFT_ASSIGN_OR_RETURN(config.logits_divisor, read("logits_scaling"));
  WEFT_ASSIGN_OR_RETURN(const double attention, read("attention_multiplier"));
  config.embedding_multiplier = embedding / residual;
  config.rms_norm_eps /= residual * residual;
  for (LayerAttention& layer : config.attention) layer.rule.scale = attention;
  return absl::OkStatus();
}

// Refuses values that turn on features that the decoder does not support. Files
// of any family may have these fields with the values that say what the model
// has anyway.
absl::Status CheckInertFields(JsonFields& fields, const ModelConfig& config) {
  WEFT_RETURN_IF_ERROR(
      fields.Only("use_qk_norm", config.qk_norm != QkNorm::kNone));
  if (config.moe.shape.shared_ffn == 0) {
    for (const char* name :
         {"shared_expert_intermediate_size", "shared_intermediate_size"}) {
      WEFT_RETURN_IF_ERROR(fields.Only(name, 0));
    }
  }
  for (const char* name :
       {"layernorm_full_attention_beta", "layernorm_linear_attention_beta",
        "layernorm_mlp_beta"}) {
    WEFT_RETURN_IF_ERROR(fields.Only(name, 1.0));
  }
  WEFT_RETURN_IF_ERROR(fields.Only("chunk_size_feed_forward", 0));
  for (const char* name :
       {"rope_interleaved", "is_encoder_decoder", "use_mrope"}) {
    WEFT_RETURN_IF_ERROR(fields.Only(name, false));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ReadDecoder(JsonFields& fields,
                                        const Family& family) {
  ModelConfig config{.model_type = std::string(family.model_type)};
  config.qk_norm = family.qk_norm;
  config.norms = family.norms;
  config.fused_qkv = family.fused_qkv;
  config.fused_gate_up = family.fused_gate_up;
  config.norms_from_one = family.gemma || family.norms_from_one;
  config.scaled_embeddings = family.gemma;
  config.sinks = family.sinks;
  WEFT_RETURN_IF_ERROR(ReadSizes(fields, family, config));
  WEFT_RETURN_IF_ERROR(ReadHeads(fields, family.sizes, config));
  WEFT_RETURN_IF_ERROR(ReadBiases(fields, family, config));
  WEFT_RETURN_IF_ERROR(ReadActivation(fields, family, config));
  WEFT_RETURN_IF_ERROR(ReadAttention(fields, family, config));
  WEFT_RETURN_IF_ERROR(ReadDelta(fields, family, config));
  WEFT_RETURN_IF_ERROR(ReadMultipliers(fields, family, config));
  WEFT_RETURN_IF_ERROR(ReadHead(fields, family, config));
  WEFT_RETURN_IF_ERROR(ReadPadding(fields, family, config));
  WEFT_RETURN_IF_ERROR(ReadMoe(fields, family, config));
  WEFT_RETURN_IF_ERROR(CheckInertFields(fields, config));
  WEFT_RETURN_IF_ERROR(ReadRope(fields, family, config));
  return config;
}

}  // namespace weft::model_config
