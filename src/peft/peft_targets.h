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

// Returns the r and lora_alpha that a file gets: those of the experts if the
// adapter has any, because PEFT's patterns cannot name single experts once
// transformers has fused them; otherwise those of `config`.
[[nodiscard]] LoraShape FileShape(const LoraConfig& config,
                                  const ModelShape& shape);

// Writes target_modules, rank_pattern and alpha_pattern. With FileShape,
// ReadTargets makes of them a config of the same layout as `config`. Without
// experts it is `config` itself.
void WriteTargets(const LoraConfig& config, const ModelShape& shape,
                  nlohmann::json& root);

// Returns a JSON integer if alpha is a whole number, because PEFT declares it
// as an integer. PEFT also reads a fraction.
[[nodiscard]] nlohmann::json AlphaToJson(double alpha);

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_PEFT_TARGETS_H_
