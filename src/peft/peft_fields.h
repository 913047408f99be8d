// Reads and refuses fields of adapter_config.json. Private to peft/.
#ifndef WEFT_SRC_PEFT_PEFT_FIELDS_H_
#define WEFT_SRC_PEFT_PEFT_FIELDS_H_

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::lora {

// Keeps the order of the file, because the first pattern that matches counts.
using PeftJson = nlohmann::ordered_json;

inline constexpr absl::string_view kPeftConfigFile = "adapter_config.json";

// Returns the value as in the file, cut if long. Does not throw on bad UTF-8.
[[nodiscard]] std::string Shown(const PeftJson& value);

// INVALID_ARGUMENT naming file, field, value and what is accepted.
[[nodiscard]] absl::Status Refused(absl::string_view field,
                                   const PeftJson& value,
                                   absl::string_view accepted);

// The field's value; null when the file does not have it.
[[nodiscard]] const PeftJson& FieldOf(const PeftJson& root, const char* field);

// A rank in [1, kMaxFileRank].
[[nodiscard]] absl::StatusOr<int> ReadRank(absl::string_view field,
                                           const PeftJson& value);

// An alpha in (0, 1e6].
[[nodiscard]] absl::StatusOr<double> ReadAlpha(absl::string_view field,
                                               const PeftJson& value);

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_PEFT_FIELDS_H_
