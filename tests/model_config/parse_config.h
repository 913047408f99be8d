// Parses configs that tests write as JSON.
#ifndef WEFT_TESTS_MODEL_CONFIG_PARSE_CONFIG_H_
#define WEFT_TESTS_MODEL_CONFIG_PARSE_CONFIG_H_

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "src/model_config/model_config.h"

namespace weft::model_config {

inline absl::StatusOr<ModelConfig> Parse(const nlohmann::json& config) {
  return ParseModelConfig(config.dump());
}

// As Parse, of a config that must be accepted.
inline ModelConfig Parsed(const nlohmann::json& json) {
  return Parse(json).value();
}

}  // namespace weft::model_config

#endif  // WEFT_TESTS_MODEL_CONFIG_PARSE_CONFIG_H_
