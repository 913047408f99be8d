// Finds the linear layers that an adapter_config.json adapts, and their ranks
// and scales. Private to src/peft.
//
// A name in a list is the end of a module's path. A string, and each key of a
// pattern, is a regular expression (src/peft/path_expression.h).
#ifndef WEFT_SRC_PEFT_PEFT_TARGETS_H_
#define WEFT_SRC_PEFT_PEFT_TARGETS_H_

#include "absl/status/status.h"
#include "src/peft/adapter_layout.h"
#include "src/peft/peft_fields.h"
#include "src/request/adapter.h"

namespace weft::lora {

// Fills target_modules and overrides of `config` from the file's
// target_modules, exclude_modules, layers_to_transform, layers_pattern,
// rank_pattern and alpha_pattern. REQUIRES: `config` has the file's r and
// lora_alpha. If `rank_stabilised`, multiplies every alpha by the square root
// of its rank, so that LoraShape::scale() is right in both cases. Errors:
// INVALID_ARGUMENT, which names the field, its value and what is accepted.
[[nodiscard]] absl::Status ReadTargets(const PeftJson& root,
                                       const ModelShape& shape,
                                       bool rank_stabilised,
                                       LoraConfig& config);

// Writes target_modules, rank_pattern and alpha_pattern from which ReadTargets
// restores `config`.
void WriteTargets(const LoraConfig& config, const ModelShape& shape,
                  nlohmann::json& root);

// Returns a JSON integer if alpha is a whole number, because PEFT declares it
// as an integer. PEFT also reads a fraction.
[[nodiscard]] nlohmann::json AlphaToJson(double alpha);

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_PEFT_TARGETS_H_
