// From a request to its handler: path, token, scope, body.
#ifndef WEFT_SERVER_TINKER_ROUTES_H_
#define WEFT_SERVER_TINKER_ROUTES_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// Begins every API key; what follows is the token.
inline constexpr char kKeyPrefix[] = "tml-";

// Finds the handler of a request by its header. Refuses: 404 (path or method),
// 401 and 403 (token). With its body the request may be refused as 400 and 413.
// Threads: the front's.
[[nodiscard]] Admission Admit(Front& front, const HttpRequest& header);

// Runs a request of the ledger, whose token was seen when it came. UNAVAILABLE
// and RESOURCE_EXHAUSTED when it must come again.
[[nodiscard]] absl::Status ServeAgain(Front& front, const CallPtr& call);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ROUTES_H_
