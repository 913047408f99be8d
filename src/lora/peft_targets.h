// Finds the linear layers that an adapter_config.json selects, and their ranks
// and alphas. Private to src/lora.
//
// A name in a list is the end of a module's path. A single string in place of a
// list is a regular expression (src/lora/path_expression.h) or, in
// target_modules, "all-linear". Each key of rank_pattern and alpha_pattern is a
// regular expression.
#ifndef WEFT_SRC_LORA_PEFT_TARGETS_H_
#define WEFT_SRC_LORA_PEFT_TARGETS_H_

#include "absl/status/status.h"
#include "src/lora/adapter_layout.h"
#include "src/lora/peft_config.h"
#include "src/request/adapter.h"

namespace weft::lora {

// Fills target_modules and overrides of `config` from the file's
// target_modules, target_parameters, exclude_modules, layers_to_transform,
// layers_pattern, rank_pattern and alpha_pattern. REQUIRES: `config` has the
// file's r and lora_alpha. If `rank_stabilised`, multiplies every alpha,
// including config.alpha, by the square root of its rank. Errors:
// INVALID_ARGUMENT, which names the field, its value and what is accepted.
absl::Status ReadTargets(const PeftJson& root,
                         const model_config::ModelShape& shape,
                         bool rank_stabilised, LoraConfig& config);

// Returns the r and lora_alpha to write to a file. If the file has single
// experts of other ranks, returns the values of the first layer's experts,
// because a pattern for each expert would make a large file. Otherwise returns
// the values of `config`.
LoraShape FileShape(const LoraConfig& config,
                    const model_config::ModelShape& shape,
                    const FileRules& rules);

// Writes target_modules, target_parameters, rank_pattern and alpha_pattern. If
// `root` has the r and lora_alpha of FileShape, ReadTargets of the file returns
// a config with the same layout.
void WriteTargets(const LoraConfig& config,
                  const model_config::ModelShape& shape, const FileRules& rules,
                  nlohmann::json& root);

// Returns a JSON integer if `alpha` is a whole number, otherwise a fraction.
// PEFT declares lora_alpha as an integer, but also reads fractions.
nlohmann::json AlphaToJson(double alpha);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_PEFT_TARGETS_H_
