// Reads windows, scales, softcaps and rotary frequencies of the attention
// layers from config.json. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_ATTENTION_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_ATTENTION_CONFIG_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"
#include "src/model_config/model_config.h"

namespace weft::model {

// Limits above those of published models.
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxPositions = 1 << 28;
inline constexpr double kMaxSoftcap = 1e6;

// Fills config.attention with one entry per layer. REQUIRES: num_layers and
// head_dim are set. Errors: UNIMPLEMENTED for attention that the decoder does
// not compute; INVALID_ARGUMENT for values out of range or fields that
// disagree.
[[nodiscard]] absl::Status ReadAttention(JsonFields& fields,
                                         const Family& family,
                                         ModelConfig& config);

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

// Reads the rotary tables from rope_parameters, or from rope_theta,
// rope_scaling and rope_local_base_freq, in the spellings of transformers 4 and
// 5. Knows the scalings default, linear, llama3, yarn, dynamic and longrope. Dynamic
// scaling changes nothing, because it applies only beyond
// max_position_embeddings, the longest context. Returns one table for all
// layers, unless layers with a window have their own table
// (Family::local_rope). Then the first table is for full layers and the second
// for layers with a window. `max_positions` is max_position_embeddings. As in
// transformers, llama3 and yarn take it for the positions of the original model
// if they do not name these. Errors: UNIMPLEMENTED for another kind of scaling
// or another field; INVALID_ARGUMENT for values out of range or spellings that
// disagree. Source: Su et al. 2021 (theta^(-2i/d)); Llama 3.1's piecewise
// scaling; Peng et al. 2023 (YaRN).
[[nodiscard]] absl::StatusOr<std::vector<RopeTable>> ReadRopeTables(
    JsonFields& config, const Family& family, int head_dim,
    int64_t max_positions);

// Fills config.rope_tables, rope_magnitude, head_order and max_positions, and the rope_table
// and scale of each layer. Layers without rotation get a table of zeros.
// REQUIRES: ReadAttention has filled config.attention. Errors: those of
// ReadRopeTables; INVALID_ARGUMENT for a bad no_rope_layers.
[[nodiscard]] absl::Status ReadRope(JsonFields& fields, const Family& family,
                                    ModelConfig& config);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_ATTENTION_CONFIG_H_
