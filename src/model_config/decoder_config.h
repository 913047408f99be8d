// Reads the decoder's configuration from the fields of config.json or of its
// text_config. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_DECODER_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_DECODER_CONFIG_H_

#include "absl/status/statusor.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"
#include "src/model_config/model_config.h"

namespace weft::model_config {

// Reads the fields that describe the decoder. The caller reads eos_token_id and
// then calls fields.Finish. Errors: those of ParseModelConfig.
absl::StatusOr<ModelConfig> ReadDecoder(JsonFields& fields,
                                        const Family& family);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_DECODER_CONFIG_H_
