// Parses JSON from files that may be damaged or hostile. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_STRICT_JSON_H_
#define WEFT_SRC_WEIGHTS_STRICT_JSON_H_

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::weights {

// The limits beyond which a document is refused.
struct JsonLimits {
  size_t max_bytes = size_t{1} << 20;
  int max_depth = 8;  // The outermost object has depth 1.
  // Limits the keys of one object, because an ordered object searches all its
  // keys for each new key.
  size_t max_keys = size_t{1} << 20;
  size_t max_values = size_t{1} << 20;  // Counts containers too.
};

// Parses one JSON object. Never throws. `Json` is nlohmann::json or, to keep
// the order of keys, nlohmann::ordered_json. Errors: INVALID_ARGUMENT, with a
// message that begins with `what`, for a syntax error, bad UTF-8, a repeated
// key, anything but an object, or too many bytes, keys, values or levels.
template <typename Json = nlohmann::json>
absl::StatusOr<Json> ParseStrictJson(absl::string_view text,
                                     absl::string_view what,
                                     const JsonLimits& limits);

// Returns the value as JSON text for a message. Cuts a long text. Never throws
// for bad UTF-8.
template <typename Json>
std::string ShownJson(const Json& value) {
  constexpr size_t kMaxShown = 80;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true,
                                Json::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return text;
}

// Returns whether the value turns a feature off: null, false, or an empty list
// or object.
template <typename Json>
bool IsOff(const Json& value) {
  return value.is_null() || value == false ||
         (value.is_structured() && value.empty());
}

// Returns the contents of a small file. Errors: those of RegularFile, naming
// the path; INVALID_ARGUMENT if the file has more than max_bytes.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t max_bytes);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_STRICT_JSON_H_
