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
  // The most keys of one object. An ordered object searches all keys for each
  // new key.
  size_t max_keys = size_t{1} << 20;
  size_t max_values = size_t{1} << 20;  // Including containers.
};

// Parses one JSON object. Never throws. `Json` is nlohmann::json or, if the
// order of keys matters, nlohmann::ordered_json. Errors: INVALID_ARGUMENT,
// which begins with `what`, for a syntax error, bad UTF-8, a repeated key,
// anything but an object, or too many bytes, keys, values or levels.
template <typename Json = nlohmann::json>
[[nodiscard]] absl::StatusOr<Json> ParseStrictJson(absl::string_view text,
                                                   absl::string_view what,
                                                   const JsonLimits& limits);

// Returns the contents of a small file that the operator owns. Errors:
// NOT_FOUND; INVALID_ARGUMENT if it is not a regular file or has more than
// max_bytes; DATA_LOSS if reading fails.
[[nodiscard]] absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                                        size_t max_bytes);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_STRICT_JSON_H_
