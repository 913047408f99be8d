// Finds the handler of a request, and checks the caller's API key.
#ifndef WEFT_SERVER_TINKER_ROUTES_H_
#define WEFT_SERVER_TINKER_ROUTES_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// Every API key begins with this prefix; the rest is the token.
inline constexpr char kKeyPrefix[] = "tml-";

// Judges the header of a request. It refuses with 404 (no such path or method),
// 401 or 403 (the token). When the body has arrived, the returned `serve` reads
// it, refuses a bad one with 400 or 413, and calls the handler.
// Threads: the front's.
[[nodiscard]] Admission Admit(Front& front, const HttpRequest& header);

// Runs a request that the ledger has kept. It checks no token, because that
// happened when the request first came. Returns the handler's error; if
// RetryMillis gives a time for it, the request should run again later.
// Threads: the front's.
[[nodiscard]] absl::Status ServeAgain(Front& front, const CallPtr& call);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ROUTES_H_
