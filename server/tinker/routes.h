// Finds the handler of a request, and checks the caller's API key.
#ifndef WEFT_SERVER_TINKER_ROUTES_H_
#define WEFT_SERVER_TINKER_ROUTES_H_

#include <span>
#include <variant>

#include "server/call/rpc_policy.h"
#include "server/tinker/front.h"
#include "server/tinker/handlers.h"

namespace weft::server::tinker {

// Every API key begins with this prefix; the rest is the token.
inline constexpr char kKeyPrefix[] = "tml-";

// Finds the route of a request by its header. Unless the route is open, checks
// the API key. Refuses with 404 (no such path or method), 400 (a bad escape in
// the target), 401 or 403 (the token). The returned `serve` parses the body
// after it has arrived, refuses a bad body with 400 or 413, and calls the
// handler.
// Threads: the front's.
Admission Admit(Front& front, const HttpRequest& header);

// What serves a route: a handler, or the text with which the route is refused,
// because Weft does not offer it.
using Action = std::variant<Handler*, Answer*, const char*>;

// A route. An asterisk in `path` stands for any one part. Unless the route is
// open, the token must have the scope that the RPC `scope` needs. The handler's
// calls to the engine do not check this scope again.
struct Route {
  const char* method;
  const char* path;
  Rpc scope;
  Action action;
  bool open = false;   // Callers need no key.
  bool large = false;  // The body may have up to --max-message-bytes.
  // Reads what the handler needs of a body that may take long. Threads: any.
  absl::Status (*read)(const Front&, Call*) = nullptr;
};

// The routes of the front, each with the scope that its callers need.
// Threads: any.
std::span<const Route> Routes();

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_ROUTES_H_
