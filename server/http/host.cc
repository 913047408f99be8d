#include "server/http/host.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"

namespace weft::server {
namespace {

bool IsAddress(int family, absl::string_view text) {
  in6_addr address;
  return inet_pton(family, std::string(text).c_str(), &address) == 1;
}

// Removes a port from the end of `host`. Returns false if something else
// follows the name.
bool RemovePort(size_t name_size, absl::string_view* host) {
  const absl::string_view rest = host->substr(name_size);
  *host = host->substr(0, name_size);
  return rest.empty() ||
         (rest.size() > 1 && rest[0] == ':' &&
          std::ranges::all_of(rest.substr(1), absl::ascii_isdigit));
}

}  // namespace

bool MayBeMeant(absl::string_view host,
                const std::vector<std::string>& allowed) {
  if (absl::StartsWith(host, "[")) {
    const size_t end = host.find(']');
    return end != absl::string_view::npos && RemovePort(end + 1, &host) &&
           IsAddress(AF_INET6, host.substr(1, end - 1));
  }
  if (!RemovePort(std::min(host.find(':'), host.size()), &host)) return false;
  absl::ConsumeSuffix(&host, ".");
  return IsAddress(AF_INET, host) ||
         absl::EqualsIgnoreCase(host, "localhost") ||
         absl::EndsWithIgnoreCase(host, ".localhost") ||
         std::ranges::any_of(allowed, [host](const std::string& name) {
           return absl::EqualsIgnoreCase(host, name);
         });
}

bool IsSameOrigin(absl::string_view origin, absl::string_view host) {
  return (absl::ConsumePrefix(&origin, "http://") ||
          absl::ConsumePrefix(&origin, "https://")) &&
         absl::EqualsIgnoreCase(origin, host);
}

std::string ClientAddress(const std::string& peer, bool peer_is_local,
                          const std::string& forwarded) {
  const bool is_address =
      IsAddress(AF_INET, forwarded) || IsAddress(AF_INET6, forwarded);
  return peer_is_local && is_address ? forwarded : peer;
}

}  // namespace weft::server
