// The routes of the front, each with the scope that its callers need.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_ROUTE_TABLE_H_
#define WEFT_SERVER_TINKER_ROUTE_TABLE_H_

#include <span>

#include "server/tinker/front.h"

namespace weft::tinker {

// A route. An asterisk in `path` stands for any one part. Unless the route is
// open, the token must have the scope that the RPC `scope` needs. The handler's
// calls to the engine do not check this scope again.
struct Route {
  const char* method;
  const char* path;
  Rpc scope;
  Handler handler;
  bool open = false;   // Callers need no key.
  bool large = false;  // The body may have up to --max-message-bytes.
  // Reads what the handler needs of a body that may take long. Threads: any.
  absl::Status (*read)(const Front&, Call*) = nullptr;
};

[[nodiscard]] std::span<const Route> Routes();

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ROUTE_TABLE_H_
