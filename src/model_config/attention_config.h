// Reads windows, scales and softcaps of the attention layers from config.json.
// Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_ATTENTION_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_ATTENTION_CONFIG_H_

#include <cstdint>

#include "absl/status/status.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"
#include "src/model_config/model_config.h"

namespace weft::model_config {

// Limits above those of published models.
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr double kMaxSoftcap = 1e6;

// Fills config.attention with one entry per layer. REQUIRES: num_layers and
// head_dim are set. Errors: UNIMPLEMENTED for attention that the decoder does
// not compute; INVALID_ARGUMENT for values out of range or fields that
// disagree.
absl::Status ReadAttention(JsonFields& fields, const Family& family,
                           ModelConfig& config);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_ATTENTION_CONFIG_H_
