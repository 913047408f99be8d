#include "server/http/url.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

absl::StatusOr<std::string> Unescape(absl::string_view text) {
  const absl::Status bad =
      absl::InvalidArgumentError("the path has a bad escape");
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    char byte = text[i];
    if (byte == '%') {
      if (i + 2 >= text.size() || !absl::ascii_isxdigit(text[i + 1]) ||
          !absl::ascii_isxdigit(text[i + 2])) {
        return bad;
      }
      byte = absl::HexStringToBytes(text.substr(i + 1, 2))[0];
      if (byte == '/') return bad;
      i += 2;
    }
    if (byte == '\0') return bad;
    out.push_back(byte);
  }
  return out;
}

}  // namespace

absl::StatusOr<Url> ParseUrl(absl::string_view target, absl::string_view root) {
  const std::pair<absl::string_view, absl::string_view> halves =
      absl::StrSplit(target, absl::MaxSplits('?', 1));
  absl::string_view path = halves.first;
  if (!absl::ConsumePrefix(&path, root)) {
    return absl::NotFoundError("there is no such path");
  }
  Url url;
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    WEFT_ASSIGN_OR_RETURN(url.parts.emplace_back(), Unescape(part));
  }
  for (const absl::string_view field :
       absl::StrSplit(halves.second, '&', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(field, absl::MaxSplits('=', 1));
    WEFT_ASSIGN_OR_RETURN(url.query[std::string(pair.first)],
                          Unescape(pair.second));
  }
  return url;
}

}  // namespace weft::server
