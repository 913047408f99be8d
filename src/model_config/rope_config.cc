#include "src/model_config/rope_config.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/model_config/attention_config.h"

namespace weft::model_config {
namespace {

using Json = nlohmann::json;

// The rotary frequencies of some layers.
struct RopeTable {
  // [head_dim / 2], with scaling applied. Pairs of features that do not rotate
  // come last, and have 0.
  std::vector<double> frequencies;
  int rotary_features = 0;  // How many of a head's features rotate.
  // The factor of the attention scores, as far as they come from features that
  // rotate. YaRN multiplies both queries and keys by attention_factor, so this
  // is the square of attention_factor.
  double score_factor = 1;
  // The positions to which YaRN extends those of the original model; 0 with
  // another scaling, or if the fields do not name the original positions.
  int64_t max_positions = 0;
  // The positions at which longrope ends here; 0 with another scaling.
  int64_t last_position = 0;
  QueryScale query_scale;
};

constexpr double kMinTheta = 1;
constexpr double kMaxTheta = 1e12;
constexpr double kMinFactor = 1e-6;
constexpr double kMaxFactor = 1e6;
constexpr double kMaxRopePositions = 1e9;
// The default of original_max_position_embeddings beside the object of fields.
constexpr int64_t kPhi3Positions = 4096;

struct Llama3Scaling {
  double factor;
  double low_frequency_factor;
  double high_frequency_factor;
  double original_positions;
};

std::vector<double> PlainFrequencies(double theta, int head_dim) {
  std::vector<double> frequencies(head_dim / 2);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = std::pow(theta, -2.0 * static_cast<double>(i) / head_dim);
  }
  return frequencies;
}

// Divides a low frequency by the factor and keeps a high frequency. A frequency
// in between gets a blend of both results.
double ScaleAsLlama3(double frequency, const Llama3Scaling& scaling) {
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength > scaling.original_positions / scaling.low_frequency_factor) {
    return frequency / scaling.factor;
  }
  if (wavelength < scaling.original_positions / scaling.high_frequency_factor) {
    return frequency;
  }
  const double kept =
      (scaling.original_positions / wavelength - scaling.low_frequency_factor) /
      (scaling.high_frequency_factor - scaling.low_frequency_factor);
  return frequency * ((1 - kept) / scaling.factor + kept);
}

// The positions of the original model. `max_positions` are those of
// max_position_embeddings.
absl::StatusOr<double> ReadOriginalPositions(JsonFields& rope,
                                             int64_t max_positions) {
  return rope.NumberOr("original_max_position_embeddings", 1, kMaxRopePositions,
                       static_cast<double>(max_positions));
}

absl::StatusOr<Llama3Scaling> ReadLlama3(JsonFields& rope,
                                         int64_t max_positions) {
  Llama3Scaling scaling{};
  WEFT_ASSIGN_OR_RETURN(scaling.factor, rope.Number("factor", 1, kMaxFactor));
  WEFT_ASSIGN_OR_RETURN(scaling.low_frequency_factor,
                        rope.Number("low_freq_factor", 1e-6, kMaxFactor));
  WEFT_ASSIGN_OR_RETURN(scaling.high_frequency_factor,
                        rope.Number("high_freq_factor", 1e-6, kMaxFactor));
  WEFT_ASSIGN_OR_RETURN(scaling.original_positions,
                        ReadOriginalPositions(rope, max_positions));
  if (scaling.high_frequency_factor <= scaling.low_frequency_factor) {
    return absl::InvalidArgumentError(
        FieldMessage("high_freq_factor", Json(scaling.high_frequency_factor),
                     "a number above low_freq_factor"));
  }
  return scaling;
}

struct YarnScaling {
  double factor;
  double attention_factor;
  double original_positions;
  double fast_rotations;
  double slow_rotations;
  bool truncates;
};

double YarnMagnitude(double factor, double scale) {
  return factor <= 1 ? 1 : 0.1 * scale * std::log(factor) + 1;
}

absl::StatusOr<double> ReadAttentionFactor(JsonFields& rope, double factor) {
  WEFT_ASSIGN_OR_RETURN(const double scale,
                        rope.NumberOr("mscale", 0, kMaxFactor, 0));
  WEFT_ASSIGN_OR_RETURN(const double scale_all,
                        rope.NumberOr("mscale_all_dim", 0, kMaxFactor, 0));
  const double implied =
      scale > 0 && scale_all > 0
          ? YarnMagnitude(factor, scale) / YarnMagnitude(factor, scale_all)
          : YarnMagnitude(factor, 1);
  return rope.NumberOr("attention_factor", 1e-6, kMaxFactor, implied);
}

absl::StatusOr<YarnScaling> ReadYarn(JsonFields& rope, int64_t max_positions) {
  YarnScaling scaling{};
  WEFT_ASSIGN_OR_RETURN(scaling.factor, rope.Number("factor", 1, kMaxFactor));
  WEFT_ASSIGN_OR_RETURN(scaling.attention_factor,
                        ReadAttentionFactor(rope, scaling.factor));
  WEFT_ASSIGN_OR_RETURN(scaling.original_positions,
                        ReadOriginalPositions(rope, max_positions));
  WEFT_ASSIGN_OR_RETURN(scaling.fast_rotations,
                        rope.NumberOr("beta_fast", 1e-6, kMaxFactor, 32));
  WEFT_ASSIGN_OR_RETURN(scaling.slow_rotations,
                        rope.NumberOr("beta_slow", 1e-6, kMaxFactor, 1));
  WEFT_ASSIGN_OR_RETURN(scaling.truncates, rope.BoolOr("truncate", true));
  return scaling;
}

// Keeps the frequencies that make many turns within `original_positions`
// tokens, and divides those that make few turns by the factor. Frequencies in
// between get a blend of both results.
void ScaleAsYarn(const YarnScaling& scaling, double theta, int head_dim,
                 std::vector<double>& frequencies) {
  // Returns the (fractional) index of the frequency that makes `rotations`
  // turns within `original_positions` tokens.
  const auto feature_of = [&](double rotations) {
    return head_dim *
           std::log(scaling.original_positions /
                    (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  double low = feature_of(scaling.fast_rotations);
  double high = feature_of(scaling.slow_rotations);
  if (scaling.truncates) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, head_dim - 1.0);
  if (low == high) high += 0.001;  // Avoids 0 / 0, as transformers does.
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double divided =
        std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] *= divided / scaling.factor + (1 - divided);
  }
}

// Reads rope_type, or `type`, the name of this field in older releases.
absl::StatusOr<std::string> ReadKind(JsonFields& rope) {
  WEFT_ASSIGN_OR_RETURN(const std::string old_spelling,
                        rope.StringOr("type", ""));
  WEFT_ASSIGN_OR_RETURN(
      const std::string kind,
      rope.StringOr("rope_type",
                    old_spelling.empty() ? "default" : old_spelling));
  if (!old_spelling.empty() && old_spelling != kind) {
    return absl::InvalidArgumentError(
        FieldMessage("rope_type", Json(kind), "the same as type"));
  }
  return kind;
}

// What a table depends on beside its object of fields.
struct RopeInputs {
  const Family& family;
  double theta = 0;
  int head_dim = 0;
  int rotary_features = 0;  // How many of a head's features rotate.
  int64_t max_positions = 0;
  // With Family::long_rope, those of the original model.
  int64_t original_positions = 0;
};

// Reads longrope: divides each frequency by a factor of its own. Factors for
// long sequences depend on the longest sequence of a batch, so this server's
// sequences end at the original model's positions.
absl::Status ScaleAsLongRope(JsonFields& rope, const RopeInputs& inputs,
                             RopeTable& table) {
  const Json* factors = rope.Find("short_factor");
  const Json* unused = rope.Find("long_factor");
  for (const Json* list : {factors, unused}) {
    const bool fits = list != nullptr && list->is_array() &&
                      list->size() == table.frequencies.size();
    if (fits && std::ranges::all_of(*list, [](const Json& factor) {
          return factor.is_number() && factor >= kMinFactor &&
                 factor <= kMaxFactor;
        })) {
      continue;
    }
    return absl::InvalidArgumentError(FieldMessage(
        list == unused ? "long_factor" : "short_factor",
        list == nullptr ? Json() : *list,
        absl::StrCat("a list of ", table.frequencies.size(),
                     " numbers, one for each pair of features that rotates")));
  }
  for (size_t i = 0; i < table.frequencies.size(); ++i) {
    table.frequencies[i] /= (*factors)[i].get<double>();
  }
  // As in transformers, the field beside the object, or its default, wins.
  WEFT_RETURN_IF_ERROR(
      ReadOriginalPositions(rope, inputs.original_positions).status());
  const auto original = static_cast<double>(inputs.original_positions);
  WEFT_ASSIGN_OR_RETURN(
      const double factor,
      rope.NumberOr("factor", 1e-6, kMaxFactor,
                    static_cast<double>(inputs.max_positions) / original));
  if (original < 2) {
    return absl::InvalidArgumentError(FieldMessage(
        "original_max_position_embeddings", Json(original), "at least 2"));
  }
  const double implied =
      factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(original));
  WEFT_ASSIGN_OR_RETURN(
      const double attention_factor,
      rope.NumberOr("attention_factor", 1e-6, kMaxFactor, implied));
  table.score_factor = attention_factor * attention_factor;
  table.last_position = static_cast<int64_t>(original);
  return absl::OkStatus();
}

// Applies the scaling `kind` to an unscaled table: changes its frequencies and,
// for YaRN, its score_factor and max_positions.
absl::Status Scale(JsonFields& rope, const std::string& kind,
                   const RopeInputs& inputs, RopeTable& table) {
  if (kind == "linear") {
    WEFT_ASSIGN_OR_RETURN(const double factor,
                          rope.Number("factor", 1, kMaxFactor));
    for (double& frequency : table.frequencies) frequency /= factor;
  } else if (kind == "dynamic") {
    // Dynamic scaling changes nothing up to max_position_embeddings, and weftd
    // refuses longer sequences. With longer sequences, every frequency would
    // depend on the longest sequence in the batch.
    WEFT_RETURN_IF_ERROR(rope.Number("factor", 1, kMaxFactor).status());
  } else if (kind == "llama3") {
    WEFT_ASSIGN_OR_RETURN(const Llama3Scaling scaling,
                          ReadLlama3(rope, inputs.max_positions));
    for (double& frequency : table.frequencies) {
      frequency = ScaleAsLlama3(frequency, scaling);
    }
  } else if (kind == "yarn") {
    const bool extends =
        rope.Find("original_max_position_embeddings") != nullptr;
    WEFT_ASSIGN_OR_RETURN(const YarnScaling scaling,
                          ReadYarn(rope, inputs.max_positions));
    if (const Json* other = rope.Find("attn_factor"); other != nullptr) {
      return UnsupportedField(
          "attn_factor", *other,
          "absent: transformers does not read it, and vLLM does. Remove it for "
          "transformers' model, or set attention_factor for another one");
    }
    ScaleAsYarn(scaling, inputs.theta, inputs.rotary_features,
                table.frequencies);
    table.score_factor = scaling.attention_factor * scaling.attention_factor;
    if (extends) {
      table.max_positions =
          static_cast<int64_t>(scaling.original_positions * scaling.factor);
    }
  } else if (kind == "longrope" && inputs.family.long_rope) {
    return ScaleAsLongRope(rope, inputs, table);
  } else if (kind != "default") {
    return UnsupportedField(
        "rope_type", Json(kind),
        absl::StrCat(
            "\"default\", \"linear\", \"llama3\", \"yarn\", \"dynamic\"",
            inputs.family.long_rope ? ", \"longrope\"" : ""));
  }
  return absl::OkStatus();
}

// Reads partial_rotary_factor, which files have beside or inside the object of
// fields. If it is there, sets inputs.rotary_features. Errors: UNIMPLEMENTED if
// the family does not have the field or if the rotating features have no pairs.
absl::Status ReadRotaryShare(JsonFields& fields, RopeInputs& inputs) {
  const bool is_there = fields.Find("partial_rotary_factor") != nullptr;
  WEFT_ASSIGN_OR_RETURN(const double share,
                        fields.NumberOr("partial_rotary_factor", 0, 1, 1));
  if (inputs.family.rotary_share == 0 && share != 1) {
    return UnsupportedField("partial_rotary_factor", Json(share),
                            absl::StrCat("1 for ", inputs.family.model_type));
  }
  if (is_there) {
    inputs.rotary_features = static_cast<int>(inputs.head_dim * share);
  }
  if (inputs.rotary_features >= 2 && inputs.rotary_features % 2 == 0) {
    return absl::OkStatus();
  }
  return UnsupportedField(
      is_there ? "partial_rotary_factor" : "rotary_dim",
      is_there ? Json(share) : Json(inputs.rotary_features),
      absl::StrCat("what makes an even number, at least 2, of head_dim = ",
                   inputs.head_dim, " features rotate"));
}

// Returns an unscaled table of the features that rotate.
RopeTable PlainTable(const RopeInputs& inputs) {
  return {.frequencies = PlainFrequencies(inputs.theta, inputs.rotary_features),
          .rotary_features = inputs.rotary_features};
}

// Reads how Ministral 3 scales queries. Its rope_parameters also repeat
// max_position_embeddings.
absl::StatusOr<QueryScale> ReadQueryScale(JsonFields& rope,
                                          const RopeInputs& inputs) {
  QueryScale scale;
  WEFT_ASSIGN_OR_RETURN(
      scale.beta, rope.NumberOr("llama_4_scaling_beta", 0, kMaxFactor, 0));
  WEFT_ASSIGN_OR_RETURN(scale.period,
                        ReadOriginalPositions(rope, inputs.max_positions));
  WEFT_ASSIGN_OR_RETURN(const int64_t same,
                        rope.IntOr("max_position_embeddings", 1, kMaxPositions,
                                   inputs.max_positions));
  if (same == inputs.max_positions) return scale;
  return absl::InvalidArgumentError(FieldMessage(
      "rope_parameters.max_position_embeddings", Json(same),
      absl::StrCat("max_position_embeddings, ", inputs.max_positions)));
}

absl::StatusOr<RopeTable> ReadScaled(JsonFields& rope, RopeInputs inputs) {
  WEFT_ASSIGN_OR_RETURN(std::string kind, ReadKind(rope));
  const bool is_multimodal = inputs.family.multimodal_rope;
  if (is_multimodal && kind == "mrope") kind = "default";
  // Old releases of Phi-3 have these names.
  if (inputs.family.long_rope && (kind == "su" || kind == "yarn")) {
    kind = "longrope";
  }
  WEFT_ASSIGN_OR_RETURN(inputs.theta, rope.NumberOr("rope_theta", kMinTheta,
                                                    kMaxTheta, inputs.theta));
  WEFT_RETURN_IF_ERROR(ReadRotaryShare(rope, inputs));
  RopeTable table = PlainTable(inputs);
  WEFT_RETURN_IF_ERROR(Scale(rope, kind, inputs, table));
  if (inputs.family.query_scale) {
    WEFT_ASSIGN_OR_RETURN(table.query_scale, ReadQueryScale(rope, inputs));
  }
  if (!is_multimodal) {
    WEFT_RETURN_IF_ERROR(rope.Finish({}));
  } else {
    WEFT_RETURN_IF_ERROR(rope.Finish({"mrope_section", "mrope_interleaved"}));
  }
  return table;
}

// Returns the table that the object `rope` describes, or an unscaled table if
// `rope` is null.
absl::StatusOr<RopeTable> ReadTable(const char* name, const Json* rope,
                                    const RopeInputs& inputs) {
  if (rope == nullptr) return PlainTable(inputs);
  if (!rope->is_object()) {
    return absl::InvalidArgumentError(
        FieldMessage(name, *rope, "an object or null"));
  }
  JsonFields fields(*rope);
  return ReadScaled(fields, inputs);
}

// Reads rope_parameters of a family with two tables. The field has one object
// for each type of layer.
absl::StatusOr<std::vector<RopeTable>> ReadNested(const Json& parameters,
                                                  RopeInputs inputs,
                                                  double local_theta) {
  if (!parameters.is_object()) {
    return absl::InvalidArgumentError(
        FieldMessage("rope_parameters", parameters, "an object or null"));
  }
  JsonFields fields(parameters);
  std::vector<RopeTable> tables(2);
  WEFT_ASSIGN_OR_RETURN(
      tables[0],
      ReadTable("full_attention", fields.Find("full_attention"), inputs));
  inputs.theta = local_theta;
  WEFT_ASSIGN_OR_RETURN(
      tables[1],
      ReadTable("sliding_attention", fields.Find("sliding_attention"), inputs));
  WEFT_RETURN_IF_ERROR(fields.Finish({}));
  return tables;
}

// Reads the rotary tables from rope_parameters, or from rope_theta,
// rope_scaling and rope_local_base_freq, in the spellings of transformers 4 and
// 5. Knows the scalings default, linear, llama3, yarn, dynamic and longrope.
// Dynamic scaling changes nothing, because it applies only beyond
// max_position_embeddings, the longest context. Returns one table for all
// layers, unless layers with a window have their own table
// (Family::local_rope). Then the first table is for full layers and the second
// for layers with a window. `max_positions` is max_position_embeddings. As in
// transformers, llama3 and yarn take it for the positions of the original model
// if they do not name these. Errors: UNIMPLEMENTED for another kind of scaling
// or another field; INVALID_ARGUMENT for values out of range or spellings that
// disagree. Source: Su et al. 2021 (theta^(-2i/d)); Llama 3.1's piecewise
// scaling; Peng et al. 2023 (YaRN).
absl::StatusOr<std::vector<RopeTable>> ReadRopeTables(JsonFields& config,
                                                      const Family& family,
                                                      int head_dim,
                                                      int64_t max_positions) {
  RopeInputs inputs{.family = family,
                    .head_dim = head_dim,
                    .rotary_features = head_dim,
                    .max_positions = max_positions};
  if (family.rotary_share > 0) {
    // MiniMax's files name the number of features that rotate.
    const auto usual = static_cast<int64_t>(head_dim * family.rotary_share);
    WEFT_ASSIGN_OR_RETURN(const int64_t features,
                          config.IntOr("rotary_dim", 2, head_dim, usual));
    inputs.rotary_features = static_cast<int>(features);
  }
  if (family.long_rope) {
    // Microsoft's files have these fields. transformers, which has the model's
    // code itself, does not read them.
    for (const char* name : {"full_attn_mod", "interpolate_factor"}) {
      WEFT_RETURN_IF_ERROR(config.IntOr(name, 1, 1, 1).status());
    }
    WEFT_ASSIGN_OR_RETURN(inputs.original_positions,
                          config.IntOr("original_max_position_embeddings", 1,
                                       kMaxPositions, kPhi3Positions));
  }
  WEFT_ASSIGN_OR_RETURN(inputs.theta, config.NumberOr("rope_theta", kMinTheta,
                                                      kMaxTheta, family.theta));
  WEFT_RETURN_IF_ERROR(ReadRotaryShare(config, inputs));
  double local_theta = inputs.theta;
  if (family.local_theta > 0) {
    WEFT_ASSIGN_OR_RETURN(local_theta,
                          config.NumberOr("rope_local_base_freq", kMinTheta,
                                          kMaxTheta, family.local_theta));
  }
  const Json* scaling = config.Find("rope_scaling");
  const Json* parameters = config.Find("rope_parameters");
  if (scaling != nullptr && parameters != nullptr && *scaling != *parameters) {
    return absl::InvalidArgumentError(FieldMessage(
        "rope_scaling", *scaling, "absent beside rope_parameters"));
  }
  if (family.needs_rope && scaling == nullptr && parameters == nullptr) {
    return UnsupportedField(
        "rope_parameters", Json(),
        "an object; releases of transformers differ in the default");
  }
  if (family.local_rope && parameters != nullptr) {
    return ReadNested(*parameters, inputs, local_theta);
  }
  std::vector<RopeTable> tables(1);
  WEFT_ASSIGN_OR_RETURN(
      tables[0],
      ReadTable(parameters != nullptr ? "rope_parameters" : "rope_scaling",
                parameters != nullptr ? parameters : scaling, inputs));
  if (family.local_rope) {
    inputs.theta = local_theta;
    tables.push_back(PlainTable(inputs));
  }
  return tables;
}

// Returns which layers rotate.
absl::StatusOr<std::vector<bool>> ReadRotatedLayers(JsonFields& fields,
                                                    const Family& family,
                                                    int num_layers) {
  std::vector<bool> rotated(num_layers, true);
  if (family.no_rope_interval == 0) return rotated;
  WEFT_ASSIGN_OR_RETURN(const int64_t interval,
                        fields.IntOr("no_rope_layer_interval", 1, kMaxLayers,
                                     family.no_rope_interval));
  WEFT_ASSIGN_OR_RETURN(const Json* const list,
                        fields.List("no_rope_layers", rotated.size()));
  for (int i = 0; i < num_layers; ++i) {
    if (list == nullptr) {
      rotated[i] = (i + 1) % interval != 0;
      continue;
    }
    // The list has a 1 for each layer that rotates.
    const Json& entry = (*list)[i];
    rotated[i] = entry == 1;
    if (!rotated[i] && entry != 0) {
      return absl::InvalidArgumentError(
          FieldMessage("no_rope_layers entry", entry, "0 or 1"));
    }
  }
  return rotated;
}

// Returns ModelConfig::head_order for heads of which the first
// `rotary_features` rotate.
std::vector<int> HeadOrder(int head_dim, int rotary_features,
                           bool interleaved) {
  if (rotary_features == head_dim && !interleaved) return {};
  const int half = head_dim / 2;
  const int pairs = rotary_features / 2;
  std::vector<int> order(head_dim);
  for (int i = 0; i < half; ++i) {
    // Features that do not rotate stay in their order.
    const bool rotates = i < pairs;
    const int first = interleaved ? 2 * i : i;
    order[i] = rotates ? first : pairs + i;
    order[half + i] =
        rotates ? (interleaved ? first + 1 : pairs + i) : half + i;
  }
  return order;
}

}  // namespace

absl::Status ReadRope(JsonFields& fields, const Family& family,
                      ModelConfig& config) {
  WEFT_ASSIGN_OR_RETURN(
      const std::vector<RopeTable> tables,
      ReadRopeTables(fields, family, config.head_dim, config.max_positions));
  WEFT_ASSIGN_OR_RETURN(const std::vector<bool> rotated,
                        ReadRotatedLayers(fields, family, config.num_layers));
  for (const RopeTable& table : tables) {
    config.rope_tables.push_back(table.frequencies);
    config.rope_tables.back().resize(config.head_dim / 2);
    config.max_positions =
        std::clamp(table.max_positions, config.max_positions, kMaxPositions);
    if (table.last_position > 0) {
      config.max_positions =
          std::min(config.max_positions, table.last_position);
    }
    config.query_scale = table.query_scale;
  }
  config.head_order = HeadOrder(config.head_dim, tables[0].rotary_features,
                                family.interleaved_rope);
  // A factor of rotated features alone is none of the whole scores.
  const bool is_partial = tables[0].rotary_features < config.head_dim;
  if (is_partial) config.rope_magnitude = std::sqrt(tables[0].score_factor);
  for (int i = 0; i < config.num_layers; ++i) {
    LayerAttention& attention = config.attention[i];
    if (rotated[i]) {
      attention.rule.scale *=
          is_partial ? 1 : tables[attention.rope_table].score_factor;
    } else {
      attention.rope_table = static_cast<int>(tables.size());
    }
  }
  if (std::ranges::find(rotated, false) != rotated.end()) {
    config.rope_tables.emplace_back(config.head_dim / 2);
  }
  return absl::OkStatus();
}

}  // namespace weft::model_config
