// The routes of the front, each with the scope that its callers need.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_ROUTE_TABLE_H_
#define WEFT_SERVER_TINKER_ROUTE_TABLE_H_

#include <span>

#include "server/tinker/front.h"

namespace weft::tinker {

// A route. An asterisk in `path` stands for any one part. The token must have
// the scope that the RPC `scope` needs. This is the only check of scopes: the
// handler's calls to the engine are not checked again.
struct Route {
  const char* method;
  const char* path;
  Rpc scope;
  Handler handler;
  bool open = false;   // Callers need no key.
  bool large = false;  // --max-message-bytes limits the body.
};

[[nodiscard]] std::span<const Route> Routes();

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ROUTE_TABLE_H_
