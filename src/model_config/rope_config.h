// Reads from config.json how the heads of attention rotate. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_ROPE_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_ROPE_CONFIG_H_

#include <cstdint>

#include "absl/status/status.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"
#include "src/model_config/model_config.h"

namespace weft::model_config {

inline constexpr int64_t kMaxPositions = 1 << 28;

// Fills config.rope_tables, rope_magnitude, head_order and max_positions, and
// the rope_table and scale of each layer. Layers without rotation get a table
// of zeros. REQUIRES: ReadAttention has filled config.attention. Errors:
// UNIMPLEMENTED for a scaling, or a field of one, that is not known;
// INVALID_ARGUMENT for a bad no_rope_layers.
absl::Status ReadRope(JsonFields& fields, const Family& family,
                      ModelConfig& config);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_ROPE_CONFIG_H_
