// Reads the fields of config.json that describe a mixture of experts. Private
// to src/model_config.
#ifndef WEFT_SRC_MODEL_CONFIG_MOE_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_MOE_CONFIG_H_

#include "absl/status/status.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"
#include "src/model_config/model_config.h"

namespace weft::model {

// Fills config.moe. May also set qkv_bias (Qwen2-MoE) and the activation
// (gpt-oss). Does nothing for a family without experts. REQUIRES: sizes, biases
// and activation of `config` are read. Errors: those of ParseModelConfig.
[[nodiscard]] absl::Status ReadMoe(JsonFields& fields, const Family& family,
                                   ModelConfig& config);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_MOE_CONFIG_H_
