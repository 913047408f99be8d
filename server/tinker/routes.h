// From a request to its handler: path, token, scope, body.
#ifndef WEFT_SERVER_TINKER_ROUTES_H_
#define WEFT_SERVER_TINKER_ROUTES_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// Begins every API key; what follows is the token.
inline constexpr char kKeyPrefix[] = "tml-";

// Runs the request's handler, or responds with why there is none: 404 (path or
// method), 401 and 403 (token), 400 and 413 (body).
// Threads: the front's.
void Serve(Front& front, HttpRequest request, const Respond& respond);

// Runs a request of the ledger, whose token was seen when it came. UNAVAILABLE
// and RESOURCE_EXHAUSTED when it must come again.
[[nodiscard]] absl::Status ServeAgain(Front& front, const CallPtr& call);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ROUTES_H_
