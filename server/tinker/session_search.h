// Searches the sessions of a caller.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SESSION_SEARCH_H_
#define WEFT_SERVER_TINKER_SESSION_SEARCH_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// Responds with one page of the caller's sessions that have not ended and match
// the body (the SDK's type SessionSearchRequest), newest first. Errors:
// UNIMPLEMENTED for projects and for other owners.
[[nodiscard]] absl::Status SearchSessions(Front& front, const CallPtr& call,
                                          const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SESSION_SEARCH_H_
