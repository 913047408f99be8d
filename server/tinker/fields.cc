#include "server/tinker/fields.h"

#include <limits>

#include "server/field_checks.h"

namespace weft::tinker {
namespace {

absl::Status Missing(const char* name) { return BadField(name, "is required"); }

absl::StatusOr<int64_t> ReadInt(const Json& value, const char* name) {
  const bool fits =
      value.is_number_integer() &&
      (!value.is_number_unsigned() ||
       value.get<uint64_t>() <=
           static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  if (!fits) return BadField(name, "must be a whole number");
  return value.get<int64_t>();
}

absl::StatusOr<std::string> ReadString(const Json& value, const char* name) {
  if (!value.is_string()) return BadField(name, "must be a string");
  return value.get<std::string>();
}

}  // namespace

const Json* Find(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

absl::StatusOr<std::string> StringField(const Json& object, const char* name) {
  const Json* const value = Find(object, name);
  if (value == nullptr) return Missing(name);
  return ReadString(*value, name);
}

absl::StatusOr<int64_t> IntField(const Json& object, const char* name) {
  const Json* const value = Find(object, name);
  if (value == nullptr) return Missing(name);
  return ReadInt(*value, name);
}

absl::StatusOr<const Json*> ObjectField(const Json& object, const char* name) {
  const Json* const value = Find(object, name);
  if (value == nullptr) return Missing(name);
  if (!value->is_object()) return BadField(name, "must be an object");
  return value;
}

absl::StatusOr<std::string> StringOr(const Json& object, const char* name,
                                     const char* otherwise) {
  const Json* const value = Find(object, name);
  if (value == nullptr) return std::string(otherwise);
  return ReadString(*value, name);
}

absl::StatusOr<int64_t> IntOr(const Json& object, const char* name,
                              int64_t otherwise) {
  const Json* const value = Find(object, name);
  return value == nullptr ? otherwise : ReadInt(*value, name);
}

absl::StatusOr<std::optional<double>> NumberIfAny(const Json& object,
                                                  const char* name) {
  const Json* const value = Find(object, name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) return BadField(name, "must be a number");
  return value->get<double>();
}

absl::StatusOr<bool> BoolOr(const Json& object, const char* name,
                            bool otherwise) {
  const Json* const value = Find(object, name);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) return BadField(name, "must be true or false");
  return value->get<bool>();
}

absl::StatusOr<std::string> ShownField(const Json& object, const char* name) {
  const Json* const value = Find(object, name);
  if (value == nullptr) return std::string();
  std::string text = value->dump();
  if (text.size() <= kMaxShownBytes) return text;
  return BadField(
      name, absl::StrCat("has ", text.size(),
                         " bytes as JSON, must have at most ", kMaxShownBytes));
}

Json Shown(const std::string& text) {
  return text.empty() ? Json() : Json::parse(text, nullptr, false);
}

absl::StatusOr<std::vector<int32_t>> Int32List(const Json& value,
                                               const char* name) {
  if (!value.is_array()) return BadField(name, "must be a list");
  std::vector<int32_t> out;
  out.reserve(value.size());
  for (const Json& entry : value) {
    const auto number = ReadInt(entry, name);
    if (!number.ok()) return number.status();
    if (*number < std::numeric_limits<int32_t>::min() ||
        *number > std::numeric_limits<int32_t>::max()) {
      return BadField(name, "has a number that needs more than 32 bits");
    }
    out.push_back(static_cast<int32_t>(*number));
  }
  return out;
}

}  // namespace weft::tinker
