#include "src/model_config/delta_config.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/model_config/attention_config.h"

namespace weft::model_config {
namespace {

using Json = nlohmann::json;

// The defaults of full_attention_interval and of the linear_* fields are those
// of all families with these fields.
constexpr int64_t kInterval = 4;
constexpr int64_t kMaxSize = 1024;  // Of heads, and of features of a head.

// Returns which layers of a family with DeltaFields are linear.
absl::StatusOr<std::vector<bool>> ReadLinearLayers(JsonFields& fields,
                                                   int num_layers) {
  WEFT_ASSIGN_OR_RETURN(
      const int64_t interval,
      fields.IntOr("full_attention_interval", 1, kMaxLayers, kInterval));
  std::vector<bool> linear(num_layers);
  WEFT_ASSIGN_OR_RETURN(const Json* const types,
                        fields.List("layer_types", linear.size()));
  for (int i = 0; i < num_layers; ++i) {
    if (types == nullptr) {
      linear[i] = (i + 1) % interval != 0;
      continue;
    }
    const Json& type = (*types)[i];
    if (type != "linear_attention" && type != "full_attention") {
      return UnsupportedField("layer_types entry", type,
                              "\"linear_attention\", \"full_attention\"");
    }
    linear[i] = type == "linear_attention";
  }
  if (std::ranges::find(linear, false) == linear.end()) {
    return UnsupportedField(
        types != nullptr ? "layer_types" : "full_attention_interval",
        types != nullptr ? *types : Json(interval),
        "at least one layer of full attention");
  }
  return linear;
}

absl::Status ReadDeltaSizes(JsonFields& fields, DeltaShape& delta) {
  const auto read = [&fields](const char* name, int64_t min, int64_t max,
                              int64_t fallback, int& size) {
    const auto value = fields.IntOr(name, min, max, fallback);
    if (value.ok()) size = static_cast<int>(*value);
    return value.status();
  };
  WEFT_RETURN_IF_ERROR(
      read("linear_num_key_heads", 1, kMaxSize, 16, delta.key_heads));
  WEFT_RETURN_IF_ERROR(
      read("linear_num_value_heads", 1, kMaxSize, 32, delta.value_heads));
  WEFT_RETURN_IF_ERROR(
      read("linear_key_head_dim", 1, kMaxSize, 128, delta.key_features));
  WEFT_RETURN_IF_ERROR(
      read("linear_value_head_dim", 1, kMaxSize, 128, delta.value_features));
  WEFT_RETURN_IF_ERROR(
      read("linear_conv_kernel_dim", 2, kMaxConvKernel, 4, delta.conv_kernel));
  if (delta.value_heads % delta.key_heads == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(FieldMessage(
      "linear_num_value_heads", Json(delta.value_heads),
      absl::StrCat("a multiple of linear_num_key_heads = ", delta.key_heads)));
}

}  // namespace

absl::Status ReadDelta(JsonFields& fields, const Family& family,
                       ModelConfig& config) {
  if (family.delta == DeltaFields::kNone) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(config.delta.layers,
                        ReadLinearLayers(fields, config.num_layers));
  WEFT_RETURN_IF_ERROR(ReadDeltaSizes(fields, config.delta));
  config.delta.is_fused = family.delta == DeltaFields::kFused;
  config.output_gate = true;
  WEFT_RETURN_IF_ERROR(fields.Only("attn_output_gate", true));
  if (config.activation != ops::Activation::kSilu) {
    return UnsupportedField("hidden_act", Json("gelu_pytorch_tanh"),
                            absl::StrCat("\"silu\" for ", family.model_type));
  }
  WEFT_ASSIGN_OR_RETURN(const std::string gate,
                        fields.StringOr("output_gate_type", "silu"));
  if (gate != "silu" && gate != "swish") {
    return UnsupportedField("output_gate_type", Json(gate),
                            "\"silu\", \"swish\"");
  }
  WEFT_RETURN_IF_ERROR(fields.Only("mamba_ssm_dtype", "float32"));
  // The part that predicts further tokens is not served.
  WEFT_RETURN_IF_ERROR(
      fields.IntOr("mtp_num_hidden_layers", 0, kMaxLayers, 0).status());
  return fields.BoolOr("mtp_use_dedicated_embeddings", false).status();
}

}  // namespace weft::model_config
