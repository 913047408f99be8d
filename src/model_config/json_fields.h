// Reads the fields of one JSON object by name, each with its range, and refuses
// fields that were not read. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_JSON_FIELDS_H_
#define WEFT_SRC_MODEL_CONFIG_JSON_FIELDS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft::model {

// Reads remember the names; Finish refuses the others. A field that is null
// counts as absent. Wrong types and values are INVALID_ARGUMENT, naming field,
// value and range.
// Threads: one. `object` outlives the reader and is a JSON object.
class JsonFields {
 public:
  explicit JsonFields(const nlohmann::json& object) : object_(object) {}

  // Returns the value, or null if the field is absent or null.
  [[nodiscard]] const nlohmann::json* Find(const char* name);
  // Returns whether the field is present and null.
  [[nodiscard]] bool IsNull(const char* name) const;

  [[nodiscard]] absl::StatusOr<int64_t> Int(const char* name, int64_t min,
                                            int64_t max);
  [[nodiscard]] absl::StatusOr<int64_t> IntOr(const char* name, int64_t min,
                                              int64_t max, int64_t fallback);
  // Both ends included; NaN is out of range.
  [[nodiscard]] absl::StatusOr<double> Number(const char* name, double min,
                                              double max);
  [[nodiscard]] absl::StatusOr<double> NumberOr(const char* name, double min,
                                                double max, double fallback);
  [[nodiscard]] absl::StatusOr<bool> BoolOr(const char* name, bool fallback);
  [[nodiscard]] absl::StatusOr<std::string> String(const char* name);
  [[nodiscard]] absl::StatusOr<std::string> StringOr(
      const char* name, const std::string& fallback);

  // Returns UNIMPLEMENTED naming the first field that was not read, is not null
  // and is not in `ignored`.
  [[nodiscard]] absl::Status Finish(
      absl::Span<const absl::string_view> ignored) const;

 private:
  const nlohmann::json& object_;
  absl::flat_hash_set<std::string> read_;
};

// Returns "field is value; accepted: ...", with a long value cut.
[[nodiscard]] std::string FieldMessage(absl::string_view field,
                                       const nlohmann::json& value,
                                       absl::string_view accepted);

// UNIMPLEMENTED with that message.
[[nodiscard]] absl::Status UnsupportedField(absl::string_view field,
                                            const nlohmann::json& value,
                                            absl::string_view accepted);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_JSON_FIELDS_H_
