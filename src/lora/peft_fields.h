// Reads fields of adapter_config.json and makes the errors for refused ones.
// Private to src/lora.
#ifndef WEFT_SRC_LORA_PEFT_FIELDS_H_
#define WEFT_SRC_LORA_PEFT_FIELDS_H_

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::lora {

// Keeps the keys in the file's order, because the first matching pattern
// counts.
using PeftJson = nlohmann::ordered_json;

inline constexpr absl::string_view kPeftConfigFile = "adapter_config.json";

// Returns the value as JSON text. Cuts a long text. Never throws for bad UTF-8.
[[nodiscard]] std::string Shown(const PeftJson& value);

// Returns INVALID_ARGUMENT, which names the file, the field, its value and what
// is accepted.
[[nodiscard]] absl::Status Refused(absl::string_view field,
                                   const PeftJson& value,
                                   absl::string_view accepted);

// Returns the field's value, or JSON null if the file does not have the field.
[[nodiscard]] const PeftJson& FieldOf(const PeftJson& root, const char* field);

// Reads a rank in [1, kMaxFileRank]. Errors: INVALID_ARGUMENT (Refused).
[[nodiscard]] absl::StatusOr<int> ReadRank(absl::string_view field,
                                           const PeftJson& value);

// Reads an alpha in (0, 1e6]. Errors: INVALID_ARGUMENT (Refused).
[[nodiscard]] absl::StatusOr<double> ReadAlpha(absl::string_view field,
                                               const PeftJson& value);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_PEFT_FIELDS_H_
