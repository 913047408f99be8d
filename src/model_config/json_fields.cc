#include "src/model_config/json_fields.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/weights/strict_json.h"

namespace weft::model_config {
namespace {

using Json = nlohmann::json;

absl::Status Refused(absl::string_view field, const Json& value,
                     absl::string_view accepted) {
  return absl::InvalidArgumentError(FieldMessage(field, value, accepted));
}

// Returns whether the type of `value` is that of `accepted`. An integer is also
// a number.
bool HasTypeOf(const Json& accepted, const Json& value) {
  if (accepted.is_number_integer()) return value.is_number_integer();
  if (accepted.is_number()) return value.is_number();
  return value.type() == accepted.type();
}

}  // namespace

std::string FieldMessage(absl::string_view field, const Json& value,
                         absl::string_view accepted) {
  return absl::StrCat(field, " is ", weights::ShownJson(value),
                      "; accepted: ", accepted);
}

absl::Status UnsupportedField(absl::string_view field, const Json& value,
                              absl::string_view accepted) {
  return absl::UnimplementedError(FieldMessage(field, value, accepted));
}

const Json* JsonFields::Find(const char* name) {
  read_.insert(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool JsonFields::IsNull(const char* name) const {
  const auto found = object_.find(name);
  return found != object_.end() && found->is_null();
}

absl::StatusOr<int64_t> JsonFields::Int(const char* name, int64_t min,
                                        int64_t max) {
  const Json* value = Find(name);
  const std::string accepted =
      absl::StrCat("an integer in [", min, ", ", max, "]");
  if (value == nullptr) return Refused(name, Json(), accepted);
  // nlohmann parses a number outside int64 as an unsigned number or a float.
  const bool fits =
      value->is_number_integer() &&
      (!value->is_number_unsigned() ||
       value->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
  if (!fits || value->get<int64_t>() < min || value->get<int64_t>() > max) {
    return Refused(name, *value, accepted);
  }
  return value->get<int64_t>();
}

absl::StatusOr<int64_t> JsonFields::IntOr(const char* name, int64_t min,
                                          int64_t max, int64_t fallback) {
  if (Find(name) == nullptr) return fallback;
  return Int(name, min, max);
}

absl::StatusOr<double> JsonFields::Number(const char* name, double min,
                                          double max) {
  const Json* value = Find(name);
  const std::string accepted =
      absl::StrCat("a number in [", min, ", ", max, "]");
  if (value == nullptr) return Refused(name, Json(), accepted);
  if (!value->is_number() || !(value->get<double>() >= min) ||
      !(value->get<double>() <= max)) {
    return Refused(name, *value, accepted);
  }
  return value->get<double>();
}

absl::StatusOr<double> JsonFields::NumberOr(const char* name, double min,
                                            double max, double fallback) {
  if (Find(name) == nullptr) return fallback;
  return Number(name, min, max);
}

absl::StatusOr<bool> JsonFields::BoolOr(const char* name, bool fallback) {
  const Json* value = Find(name);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) return Refused(name, *value, "true or false");
  return value->get<bool>();
}

absl::StatusOr<const Json*> JsonFields::List(const char* name, size_t size) {
  const Json* value = Find(name);
  if (value != nullptr && (!value->is_array() || value->size() != size)) {
    return Refused(name, *value, absl::StrCat("a list of ", size));
  }
  return value;
}

absl::StatusOr<std::string> JsonFields::String(const char* name) {
  const Json* value = Find(name);
  if (value == nullptr) return Refused(name, Json(), "a string");
  if (!value->is_string()) return Refused(name, *value, "a string");
  return value->get<std::string>();
}

absl::StatusOr<std::string> JsonFields::StringOr(const char* name,
                                                 const std::string& fallback) {
  if (Find(name) == nullptr) return fallback;
  return String(name);
}

absl::Status JsonFields::Only(const char* name, const Json& accepted) {
  const Json* value = Find(name);
  if (value == nullptr) return absl::OkStatus();
  if (!HasTypeOf(accepted, *value)) {
    return Refused(name, *value, accepted.dump());
  }
  if (*value == accepted) return absl::OkStatus();
  return UnsupportedField(name, *value, accepted.dump());
}

absl::Status JsonFields::Same(const char* name, int64_t value,
                              absl::string_view other) {
  const Json* repeated = Find(name);
  if (repeated == nullptr || *repeated == value) return absl::OkStatus();
  return Refused(name, *repeated,
                 absl::StrCat("the same as ", other, " = ", value));
}

absl::Status JsonFields::Finish(
    absl::Span<const absl::string_view> ignored) const {
  for (const auto& [name, value] : object_.items()) {
    if (weights::IsOff(value) || read_.contains(name) ||
        std::ranges::find(ignored, name) != ignored.end()) {
      continue;
    }
    return absl::UnimplementedError(
        FieldMessage(weights::ShownJson(Json(name)), value,
                     "absent, since this server does not honour it"));
  }
  return absl::OkStatus();
}

}  // namespace weft::model_config
