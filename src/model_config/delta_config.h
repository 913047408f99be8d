// Reads the layers with a gated delta rule from config.json. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_DELTA_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_DELTA_CONFIG_H_

#include "absl/status/status.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"
#include "src/model_config/model_config.h"

namespace weft::model_config {

// Sets config.delta and config.output_gate. Does nothing for a family without
// DeltaFields. REQUIRES: the number of layers and the activation are read.
// Errors: those of ParseModelConfig.
absl::Status ReadDelta(JsonFields& fields, const Family& family,
                       ModelConfig& config);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_DELTA_CONFIG_H_
