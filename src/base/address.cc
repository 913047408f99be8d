#include "src/base/address.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace weft {

absl::StatusOr<HostPort> ParseHostPort(absl::string_view flag,
                                       absl::string_view address) {
  const size_t colon = address.rfind(':');
  HostPort result;
  if (colon == absl::string_view::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &result.port) ||
      result.port < 0 || result.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, "=", address,
                     " is not HOST:PORT with a port in [0, 65535]"));
  }
  absl::string_view host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (absl::StrContains(host, ':')) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--", flag, "=", address, ": write an IPv6 address as [ADDRESS]:PORT"));
  }
  result.host = std::string(host);
  return result;
}

std::string UnixSocketPath(absl::string_view listen) {
  return absl::ConsumePrefix(&listen, "unix:") ? std::string(listen) : "";
}

bool IsLoopback(absl::string_view host) {
  if (host == "localhost" || host == "::1") return true;
  // Only a complete dotted quad is an address. "127.example.com" is a host name
  // that anybody may own.
  const std::vector<absl::string_view> parts = absl::StrSplit(host, '.');
  if (parts.size() != 4 || parts[0] != "127") return false;
  for (const absl::string_view part : parts) {
    int value = 0;
    if (!absl::SimpleAtoi(part, &value) || value < 0 || value > 255) {
      return false;
    }
  }
  return true;
}

}  // namespace weft
