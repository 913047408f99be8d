#include "server/tinker/model_input.h"

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::tinker {

absl::StatusOr<std::vector<int32_t>> ReadModelInput(const Json& object,
                                                    const char* name) {
  WEFT_ASSIGN_OR_RETURN(const Json* const input, ObjectField(object, name));
  const Json* const chunks = Find(*input, "chunks");
  if (chunks == nullptr || !chunks->is_array()) {
    return BadField(absl::StrCat(name, ".chunks"), "must be a list");
  }
  std::vector<int32_t> tokens;
  for (const Json& chunk : *chunks) {
    if (!chunk.is_object()) return BadField(name, "has a chunk of no kind");
    WEFT_ASSIGN_OR_RETURN(const std::string type,
                          StringOr(chunk, "type", "encoded_text"));
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

}  // namespace weft::tinker
