#include "server/tinker/wire/fields.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
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

absl::StatusOr<bool> ReadBool(const Json& value, const char* name) {
  if (!value.is_boolean()) return BadField(name, "must be true or false");
  return value.get<bool>();
}

// Returns what `read` returns for the field; `otherwise` if it is absent.
template <typename T>
absl::StatusOr<T> Read(const Json& object, const char* name,
                       const std::optional<T>& otherwise,
                       absl::StatusOr<T> (*read)(const Json&, const char*)) {
  const Json* const value = Find(object, name);
  if (value != nullptr) return read(*value, name);
  if (otherwise) return *otherwise;
  return Missing(name);
}

struct Refusal {
  const char* field;
  const char* message;
};
constexpr Refusal kRefusals[] = {
    {"age_encryption_recipients",
     "age_encryption_recipients is not offered, because files are not "
     "encrypted here: leave it out, and have TLS protect the download. "
     "weights.download of the cookbook always sends it, except for a path that "
     "save_weights_external returned"},
    {"weights_access_token",
     "weights_access_token is not offered: checkpoints are their tenant's"}};

}  // namespace

const Json* Find(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

absl::StatusOr<std::string> Text(const Json& object, const char* name,
                                 const std::optional<std::string>& otherwise) {
  return Read(object, name, otherwise, ReadString);
}

absl::StatusOr<int64_t> Int(const Json& object, const char* name,
                            const std::optional<int64_t>& otherwise) {
  return Read(object, name, otherwise, ReadInt);
}

absl::StatusOr<bool> Bool(const Json& object, const char* name,
                          bool otherwise) {
  return Read<bool>(object, name, otherwise, ReadBool);
}

absl::StatusOr<const Json*> Object(const Json& object, const char* name) {
  const Json* const value = Find(object, name);
  if (value == nullptr) return Missing(name);
  if (!value->is_object()) return BadField(name, "must be an object");
  return value;
}

absl::StatusOr<const Json*> List(const Json& object, const char* name,
                                 absl::string_view shown) {
  const Json* const value = Find(object, name);
  if (value == nullptr || !value->is_array()) {
    return BadField(shown, "must be a list");
  }
  return value;
}

absl::StatusOr<uint32_t> Count(const Json& object, const char* name,
                               int64_t otherwise, double low) {
  if (Find(object, name) == nullptr) return static_cast<uint32_t>(otherwise);
  WEFT_ASSIGN_OR_RETURN(const int64_t count, Int(object, name));
  WEFT_RETURN_IF_ERROR(
      CheckReal(name, static_cast<double>(count), {.low = low, .high = 1e9}));
  return static_cast<uint32_t>(count);
}

absl::StatusOr<std::optional<double>> Number(const Json& object,
                                             const char* name) {
  const Json* const value = Find(object, name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) return BadField(name, "must be a number");
  return value->get<double>();
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

void ShowMetadata(const std::string& text, Json* object) {
  Json metadata = Shown(text);
  if (metadata.is_object()) (*object)["user_metadata"] = std::move(metadata);
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

absl::StatusOr<std::vector<int32_t>> ReadModelInput(const Json& object,
                                                    const char* name) {
  WEFT_ASSIGN_OR_RETURN(const Json* const input, Object(object, name));
  WEFT_ASSIGN_OR_RETURN(const Json* const chunks,
                        List(*input, "chunks", absl::StrCat(name, ".chunks")));
  std::vector<int32_t> tokens;
  for (const Json& chunk : *chunks) {
    if (!chunk.is_object()) return BadField(name, "has a chunk of no kind");
    WEFT_ASSIGN_OR_RETURN(const std::string type,
                          Text(chunk, "type", "encoded_text"));
    if (type != "encoded_text") {
      return absl::UnimplementedError(absl::StrCat(
          name, " has a chunk ", Quoted(type), ": only text is offered"));
    }
    const Json* const list = Find(chunk, "tokens");
    if (list == nullptr) return BadField("tokens", "is required");
    WEFT_ASSIGN_OR_RETURN(const auto part, Int32List(*list, "tokens"));
    tokens.insert(tokens.end(), part.begin(), part.end());
  }
  return tokens;
}

absl::Status NoProjects(const char* field) {
  return absl::UnimplementedError(absl::StrCat(
      field, " is not offered: this server has no projects. Leave it out"));
}

bool AsksFor(const Json& body, const char* field) {
  const Json* const value = Find(body, field);
  if (value == nullptr) return false;
  if (value->is_boolean()) return value->get<bool>();
  if (value->is_number()) return *value != 0;
  if (value->is_string()) return *value != "";
  return !value->empty();
}

absl::Status RefuseFields(const Json& body) {
  for (const Refusal& refusal : kRefusals) {
    if (AsksFor(body, refusal.field)) {
      return absl::UnimplementedError(refusal.message);
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::server::tinker
