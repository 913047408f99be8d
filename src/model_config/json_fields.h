// Reads the fields of one JSON object by name and checks their ranges. Refuses
// fields that nobody has read. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_JSON_FIELDS_H_
#define WEFT_SRC_MODEL_CONFIG_JSON_FIELDS_H_

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft::model_config {

// Each read notes the field's name, and Finish refuses all fields that were not
// read. A field that is null counts as absent. An absent required field, a
// wrong type or a wrong value is an INVALID_ARGUMENT error, which names the
// field, the value and the range. The JSON object outlives the reader. Threads:
// not thread-safe.
class JsonFields {
 public:
  explicit JsonFields(const nlohmann::json& object) : object_(object) {}

  // Returns the value, or null if the field is absent or null.
  const nlohmann::json* Find(const char* name);
  // Returns whether the field is present and null.
  bool IsNull(const char* name) const;

  absl::StatusOr<int64_t> Int(const char* name, int64_t min, int64_t max);
  absl::StatusOr<int64_t> IntOr(const char* name, int64_t min, int64_t max,
                                int64_t fallback);
  // Ranges include both ends. NaN is out of range.
  absl::StatusOr<double> Number(const char* name, double min, double max);
  absl::StatusOr<double> NumberOr(const char* name, double min, double max,
                                  double fallback);
  absl::StatusOr<bool> BoolOr(const char* name, bool fallback);
  // Returns the list, or null if the field is absent or null. Refuses a list
  // that does not have `size` entries.
  absl::StatusOr<const nlohmann::json*> List(const char* name, size_t size);
  absl::StatusOr<std::string> String(const char* name);
  absl::StatusOr<std::string> StringOr(const char* name,
                                       const std::string& fallback);

  // Returns UNIMPLEMENTED if the field is present and has another value than
  // `accepted`, the only one for which the decoder computes what it should;
  // INVALID_ARGUMENT if the value has another type.
  absl::Status Only(const char* name, const nlohmann::json& accepted);
  // Returns INVALID_ARGUMENT if the field is present and has another value than
  // `value`, that of the field `other`, which it repeats.
  absl::Status Same(const char* name, int64_t value, absl::string_view other);

  // Returns UNIMPLEMENTED if a field is on, was not read and is not in
  // `ignored`. Names the first such field. A field is off if it is null, false,
  // or an empty list or object.
  absl::Status Finish(absl::Span<const absl::string_view> ignored) const;

 private:
  const nlohmann::json& object_;
  absl::flat_hash_set<std::string> read_;
};

// Returns the message "`field` is `value`; accepted: `accepted`". Cuts a long
// value.
std::string FieldMessage(absl::string_view field, const nlohmann::json& value,
                         absl::string_view accepted);

// Returns UNIMPLEMENTED with the text of FieldMessage.
absl::Status UnsupportedField(absl::string_view field,
                              const nlohmann::json& value,
                              absl::string_view accepted);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_JSON_FIELDS_H_
