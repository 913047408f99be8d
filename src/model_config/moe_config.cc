#include "src/model_config/moe_config.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft::model {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxExperts = 4096;
constexpr int64_t kMaxExpertFfn = 1 << 20;
constexpr int64_t kMaxContext = 1 << 28;
constexpr double kMaxCoefficient = 1e6;

// Reads num_experts or num_local_experts: transformers 4 and 5 have different
// names for this field.
absl::StatusOr<int64_t> ReadNumExperts(JsonFields& fields,
                                       const Family& family) {
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
    WEFT_ASSIGN_OR_RETURN(config.qkv_bias, fields.BoolOr("qkv_bias", true));
  }
  // Reads max_window_layers, so that Finish accepts the field. Only models with
  // windows use its value (ReadAttention).
  WEFT_RETURN_IF_ERROR(
      fields.IntOr("max_window_layers", 0, kMaxExpertFfn, 0).status());
  WEFT_ASSIGN_OR_RETURN(moe.normalizes_weights,
                        fields.BoolOr("norm_topk_prob", false));
  WEFT_ASSIGN_OR_RETURN(moe.shape.layers,
                        ReadSparseLayers(fields, config.num_layers));
  return absl::OkStatus();
}

// Gives every layer experts with intermediate_size features.
void PutInEveryLayer(lora::ExpertNames names, ModelConfig& config) {
  lora::ExpertShape& experts = config.moe.shape;
  experts.ffn = config.ffn;
  experts.names = names;
  experts.layers.assign(config.num_layers, true);
}

absl::Status ReadMixtral(JsonFields& fields, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  PutInEveryLayer(lora::ExpertNames::kMixtral, config);
  moe.normalizes_weights = true;
  WEFT_ASSIGN_OR_RETURN(
      const double noise,
      fields.NumberOr("router_jitter_noise", 0, kMaxCoefficient, 0));
  if (noise != 0) {
    return UnsupportedField("router_jitter_noise", Json(noise), "0");
  }
  return absl::OkStatus();
}

absl::Status ReadGptOss(JsonFields& fields, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  PutInEveryLayer(lora::ExpertNames::kFused, config);
  moe.softmax_of_chosen = true;
  // config.json says silu, but the model computes a clamped silu.
  if (config.activation != ops::Activation::kSilu) {
    return UnsupportedField("hidden_act", Json("gelu_pytorch_tanh"),
                            "\"silu\" for gpt_oss");
  }
  config.activation = ops::Activation::kClampedSilu;
  WEFT_ASSIGN_OR_RETURN(const double limit,
                        fields.NumberOr("swiglu_limit", 0, kMaxCoefficient,
                                        ops::kClampedSiluLimit));
  if (limit != ops::kClampedSiluLimit) {
    return UnsupportedField("swiglu_limit", Json(limit),
                            absl::StrCat(ops::kClampedSiluLimit));
  }
  // Ignores initial_context_length. Published files also have rope_scaling,
  // which gives the same length.
  WEFT_RETURN_IF_ERROR(
      fields.IntOr("initial_context_length", 1, kMaxContext, 1).status());
  WEFT_ASSIGN_OR_RETURN(
      const int64_t same,
      fields.IntOr("experts_per_token", 1, kMaxExperts, moe.shape.per_token));
  if (same != moe.shape.per_token) {
    return absl::InvalidArgumentError(
        FieldMessage("experts_per_token", Json(same),
                     absl::StrCat("the same as num_experts_per_tok = ",
                                  moe.shape.per_token)));
  }
  const Json* quantization = fields.Find("quantization_config");
  if (quantization != nullptr &&
      (!quantization->is_object() ||
       quantization->value("quant_method", Json()) != "mxfp4")) {
    return UnsupportedField("quantization_config", *quantization,
                            "quant_method \"mxfp4\", or null");
  }
  return absl::OkStatus();
}

}  // namespace

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
    case ExpertFields::kMixtral:
      return ReadMixtral(fields, config);
    case ExpertFields::kGptOss:
      return ReadGptOss(fields, config);
    default:
      return ReadQwen(fields, family, config);
  }
}

}  // namespace weft::model
