#include "src/model_config/attention_config.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft::model_config {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxWindow = 1 << 28;
constexpr double kMaxScalar = 1e6;

// Returns whether use_sliding_window and max_window_layers decide which layers
// have windows.
bool IsSwitched(WindowScheme scheme) {
  return scheme == WindowScheme::kLateLayers ||
         scheme == WindowScheme::kEvenLayers;
}

// Returns the window in tokens; 0 means that there is none.
absl::StatusOr<int64_t> ReadWindow(JsonFields& fields, const Family& family) {
  const bool off = fields.IsNull("sliding_window");
  // transformers 5 writes 0 for a Qwen2-MoE without windows.
  const int64_t least = IsSwitched(family.windows) ? 0 : 1;
  WEFT_ASSIGN_OR_RETURN(const int64_t window,
                        fields.IntOr("sliding_window", least, kMaxWindow,
                                     off ? 0 : family.window));
  // Some Gemma 2 files call sliding_window `sliding_window_size`.
  WEFT_RETURN_IF_ERROR(
      fields.Same("sliding_window_size", window, "sliding_window"));
  const WindowScheme scheme = family.windows;
  WEFT_ASSIGN_OR_RETURN(
      const bool use_window,
      fields.BoolOr("use_sliding_window", !IsSwitched(scheme)));
  if (!use_window && (IsSwitched(scheme) || scheme == WindowScheme::kNone)) {
    return 0;
  }
  if (!use_window && window > 0) {
    return UnsupportedField(
        "use_sliding_window", Json(false),
        absl::StrCat("true for ", family.model_type, " with a sliding_window"));
  }
  if (scheme == WindowScheme::kNone && window > 0) {
    return UnsupportedField("sliding_window", Json(window),
                            "null, or use_sliding_window false");
  }
  return window;
}

// Returns whether the scheme gives the layer a window. max_layers: the field
// max_window_layers.
bool HasWindow(int layer, WindowScheme scheme, int64_t max_layers,
               int64_t pattern) {
  switch (scheme) {
    case WindowScheme::kNone:
      return false;
    case WindowScheme::kEveryLayer:
      return true;
    case WindowScheme::kLateLayers:
      return layer >= max_layers;
    case WindowScheme::kEvenLayers:
      return layer < max_layers && layer % 2 == 0;
    case WindowScheme::kPattern:
      return (layer + 1) % pattern != 0;
  }
  return false;
}

// Returns which layers have a sliding window if the file has no layer_types.
absl::StatusOr<std::vector<bool>> ReadScheme(JsonFields& fields,
                                             const Family& family,
                                             int64_t window, int num_layers) {
  int64_t max_layers = 0;
  // Without windows, the value does not matter.
  if (IsSwitched(family.windows) || window == 0) {
    WEFT_ASSIGN_OR_RETURN(max_layers,
                          fields.IntOr("max_window_layers", 0, kMaxWindow,
                                       family.max_window_layers));
  }
  int64_t pattern = family.pattern;
  if (family.local_theta > 0) {  // Only files of Gemma 3 can set the pattern.
    WEFT_ASSIGN_OR_RETURN(pattern, fields.IntOr("sliding_window_pattern", 1,
                                                kMaxLayers, pattern));
    // transformers writes "_sliding_window_pattern" but reads
    // "sliding_window_pattern". Values that disagree are accepted only if the
    // file has layer_types, which replaces the pattern.
    WEFT_ASSIGN_OR_RETURN(
        const int64_t written,
        fields.IntOr("_sliding_window_pattern", 1, kMaxLayers, pattern));
    if (written != pattern && fields.Find("layer_types") == nullptr) {
      return UnsupportedField(
          "_sliding_window_pattern", Json(written),
          absl::StrCat(pattern, ", or any beside layer_types"));
    }
  }
  std::vector<bool> slides(num_layers);
  for (int i = 0; i < num_layers; ++i) {
    slides[i] = (window > 0 || family.windows == WindowScheme::kPattern) &&
                HasWindow(i, family.windows, max_layers, pattern);
  }
  return slides;
}

// Sets `slides` from layer_types if the file has that field.
absl::Status ReadLayerTypes(JsonFields& fields, const Family& family,
                            int64_t window, std::vector<bool>& slides) {
  WEFT_ASSIGN_OR_RETURN(const Json* const types,
                        fields.List("layer_types", slides.size()));
  if (types == nullptr) return absl::OkStatus();
  const bool fixed = family.windows == WindowScheme::kNone ||
                     family.windows == WindowScheme::kEveryLayer;
  for (size_t i = 0; i < slides.size(); ++i) {
    const Json& type = (*types)[i];
    const bool sliding = type == "sliding_attention";
    if (!sliding && type != "full_attention") {
      return UnsupportedField("layer_types entry", type,
                              "\"full_attention\", \"sliding_attention\"");
    }
    if (fixed && sliding != slides[i]) {
      return UnsupportedField(
          "layer_types entry", type,
          absl::StrCat(slides[i] ? "\"sliding_attention\" for "
                                 : "\"full_attention\" for ",
                       family.model_type, ", as its sliding_window says"));
    }
    if (sliding && window == 0) {
      return absl::InvalidArgumentError(FieldMessage(
          "layer_types entry", type,
          "\"full_attention\", since sliding_window is null or off"));
    }
    slides[i] = sliding;
  }
  return absl::OkStatus();
}

// Reads the scale and the softcap, which all layers share.
absl::StatusOr<ops::AttentionRule> ReadRule(JsonFields& fields,
                                            const Family& family,
                                            int head_dim) {
  double scalar = head_dim;
  if (family.gemma) {
    constexpr double kGemmaScalar = 256;
    WEFT_ASSIGN_OR_RETURN(scalar, fields.NumberOr("query_pre_attn_scalar", 1e-6,
                                                  kMaxScalar, kGemmaScalar));
    WEFT_RETURN_IF_ERROR(fields.Only("use_bidirectional_attention", false));
  }
  ops::AttentionRule rule{.scale = 1 / std::sqrt(scalar)};
  if (family.softcap_fields && !fields.IsNull("attn_logit_softcapping")) {
    WEFT_ASSIGN_OR_RETURN(
        rule.softcap, fields.NumberOr("attn_logit_softcapping", 1e-6,
                                      kMaxSoftcap, family.attention_softcap));
  }
  return rule;
}

}  // namespace

absl::Status ReadAttention(JsonFields& fields, const Family& family,
                           ModelConfig& config) {
  WEFT_ASSIGN_OR_RETURN(const int64_t window, ReadWindow(fields, family));
  WEFT_ASSIGN_OR_RETURN(std::vector<bool> slides,
                        ReadScheme(fields, family, window, config.num_layers));
  if (family.delta == DeltaFields::kNone) {
    WEFT_RETURN_IF_ERROR(ReadLayerTypes(fields, family, window, slides));
  }
  WEFT_ASSIGN_OR_RETURN(const ops::AttentionRule rule,
                        ReadRule(fields, family, config.head_dim));
  if (window == 0 && std::ranges::find(slides, true) != slides.end()) {
    return UnsupportedField(
        "sliding_window", Json(),
        absl::StrCat("a number for ", family.model_type,
                     ", unless layer_types has full_attention alone"));
  }
  config.attention.assign(config.num_layers, {.rule = rule});
  for (int i = 0; i < config.num_layers; ++i) {
    if (!slides[i]) continue;
    config.attention[i].rule.window = window;
    if (family.local_rope) config.attention[i].rope_table = 1;
  }
  return absl::OkStatus();
}

}  // namespace weft::model_config
