// Tells who calls an HTTP server, and whether the server is meant.
#ifndef WEFT_SERVER_HTTP_HOST_H_
#define WEFT_SERVER_HTTP_HOST_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace weft::server {

// Returns whether a request with this Host header may be meant for this server.
// That is so for IP addresses, localhost, and the names in `allowed`, with or
// without a port. Any other name may belong to a stranger, who lets it resolve
// to this server, so that a browser takes the stranger's page for a part of
// this server (DNS rebinding). An address needs no name service, so it is safe.
bool MayBeMeant(absl::string_view host,
                const std::vector<std::string>& allowed);

// Returns whether a browser sent the request for a page of this server.
// `origin` is the Origin header, and `host` is HttpRequest::host.
bool IsSameOrigin(absl::string_view origin, absl::string_view host);

// Returns the client's address for logs. `peer` is the other end of the
// connection. If the peer is on this machine, it may be the edge
// (deploy/edge), which names its client in X-Real-IP: `forwarded`.
std::string ClientAddress(const std::string& peer, bool peer_is_local,
                          const std::string& forwarded);

}  // namespace weft::server

#endif  // WEFT_SERVER_HTTP_HOST_H_
