// The target of a request, taken apart.
#ifndef WEFT_SERVER_TINKER_URL_H_
#define WEFT_SERVER_TINKER_URL_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::tinker {

struct Url {
  std::vector<std::string> parts;  // The path behind /api/v1.
  std::map<std::string, std::string> query;
};

// Undoes percent signs within each part. A part may then hold any byte but NUL
// and '/'.
// Errors: NOT_FOUND for a path elsewhere; INVALID_ARGUMENT for bad escapes.
// Threads: any.
[[nodiscard]] absl::StatusOr<Url> ParseUrl(absl::string_view target);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_URL_H_
