// Reads and writes the adapter_config.json of a PEFT LoRA folder. Torch-free.
#ifndef WEFT_SRC_LORA_PEFT_CONFIG_H_
#define WEFT_SRC_LORA_PEFT_CONFIG_H_

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/lora/adapter_layout.h"
#include "src/lora/loader_rules.h"
#include "src/request/adapter.h"

namespace weft::lora {

// The largest rank that a file may have. The server's --max-rank also applies.
inline constexpr int kMaxFileRank = 4096;

// Parses a client's file: ranks, alphas, and the layers and modules that the
// file selects (src/lora/peft_targets.h). For a rank-stabilised adapter
// (use_rslora), multiplies each alpha by sqrt(rank). Accepts lora_dropout and
// does not apply it. Errors: INVALID_ARGUMENT, which names the field, its value
// and what is accepted.
absl::StatusOr<LoraConfig> ParsePeftConfig(
    absl::string_view json, const model_config::ModelShape& shape);

// Returns the file for an adapter. `config` has what the file's tensors have:
// if rules.one_rank, the rank of all of them. Equal inputs give equal bytes.
std::string WritePeftConfig(const LoraConfig& config,
                            const model_config::ModelShape& shape,
                            const FileRules& rules,
                            const std::string& base_model_name);

// The functions below read fields of adapter_config.json, and make the errors
// for refused ones. They are private to src/lora.

// Keeps the keys in the file's order, because the first matching pattern
// counts.
using PeftJson = nlohmann::ordered_json;

inline constexpr absl::string_view kPeftConfigFile = "adapter_config.json";

// Returns INVALID_ARGUMENT, which names the file, the field, its value and what
// is accepted.
absl::Status Refused(absl::string_view field, const PeftJson& value,
                     absl::string_view accepted);

// Returns the field's value, or JSON null if the file does not have the field.
const PeftJson& FieldOf(const PeftJson& root, const char* field);

// Reads a rank in [1, kMaxFileRank]. Errors: INVALID_ARGUMENT (Refused).
absl::StatusOr<int> ReadRank(absl::string_view field, const PeftJson& value);

// Reads an alpha in (0, 1e6]. Errors: INVALID_ARGUMENT (Refused).
absl::StatusOr<double> ReadAlpha(absl::string_view field,
                                 const PeftJson& value);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_PEFT_CONFIG_H_
