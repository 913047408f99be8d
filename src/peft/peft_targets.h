// Finds the linear layers that an adapter_config.json adapts, with rank and
// scale. Private to peft/.
//
// Names in a list are ends of module paths; a string, and the keys of a
// pattern, are regular expressions (src/peft/path_expression.h).
#ifndef WEFT_SRC_PEFT_PEFT_TARGETS_H_
#define WEFT_SRC_PEFT_PEFT_TARGETS_H_

#include "absl/status/status.h"
#include "src/peft/adapter_layout.h"
#include "src/peft/peft_fields.h"
#include "src/request/adapter.h"

namespace weft::lora {

// Fills target_modules and overrides of `config` from target_modules,
// exclude_modules, layers_to_transform, layers_pattern, rank_pattern and
// alpha_pattern of the file. `config` has r and lora_alpha of the file. If
// `rank_stabilised`, every alpha is multiplied by the root of its rank, so that
// LoraShape::scale() is right for both.
// Errors: INVALID_ARGUMENT naming the field, its value and what is accepted.
[[nodiscard]] absl::Status ReadTargets(const PeftJson& root,
                                       const ModelShape& shape,
                                       bool rank_stabilised,
                                       LoraConfig& config);

// Sets target_modules, rank_pattern and alpha_pattern, so that ReadTargets
// gives `config` back.
void WriteTargets(const LoraConfig& config, const ModelShape& shape,
                  nlohmann::json& root);

// Returns a JSON integer if the alpha is whole, as PEFT declares it. Readers
// also take a fraction.
[[nodiscard]] nlohmann::json AlphaToJson(double alpha);

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_PEFT_TARGETS_H_
