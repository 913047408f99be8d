// Reads and writes the adapter_config.json of a PEFT LoRA folder. Torch-free.
#ifndef WEFT_SRC_LORA_PEFT_CONFIG_H_
#define WEFT_SRC_LORA_PEFT_CONFIG_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/lora/adapter_layout.h"
#include "src/request/adapter.h"

namespace weft::lora {

// The largest rank that a file may have. The server's --max-rank also applies.
inline constexpr int kMaxFileRank = 4096;

// Parses a client's file: ranks, alphas, and the layers and modules that the
// file selects (src/lora/peft_targets.h). For a rank-stabilised adapter
// (use_rslora), multiplies each alpha by sqrt(rank). Accepts lora_dropout and
// does not apply it. Errors: INVALID_ARGUMENT, which names the field, its value
// and what is accepted.
[[nodiscard]] absl::StatusOr<LoraConfig> ParsePeftConfig(
    absl::string_view json, const ModelShape& shape);

// Returns the file for an adapter. Equal inputs give equal bytes.
[[nodiscard]] std::string WritePeftConfig(const LoraConfig& config,
                                          const ModelShape& shape,
                                          const std::string& base_model_name);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_PEFT_CONFIG_H_
