// Splits the target of a request into the parts of its path and its query.
#ifndef WEFT_SERVER_HTTP_URL_H_
#define WEFT_SERVER_HTTP_URL_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::server {

struct Url {
  std::vector<std::string> parts;  // The path after the root, split at '/'.
  std::map<std::string, std::string> query;
};

// Parses a target and decodes %XX in the parts of the path and in the values of
// the query. A part may then hold any byte except NUL and '/'.
// Errors: NOT_FOUND if the path does not begin with `root`; INVALID_ARGUMENT
// for NUL, and for an escape that is malformed or stands for '/'.
// Threads: any.
absl::StatusOr<Url> ParseUrl(absl::string_view target, absl::string_view root);

}  // namespace weft::server

#endif  // WEFT_SERVER_HTTP_URL_H_
