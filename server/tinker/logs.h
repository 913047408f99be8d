// Several logs of a state in a store: which one has a session, and who has that
// log. If there are several, the ids of sessions, and so those of their models,
// sampling sessions and futures, begin with the number of the log that has made
// them. A session that has moved has an entry in the directory, which says
// where it is.
#ifndef WEFT_SERVER_TINKER_LOGS_H_
#define WEFT_SERVER_TINKER_LOGS_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/tinker/front.h"
#include "server/tinker/routes.h"

namespace weft::server::tinker {

// Returns what the ids of this log's sessions begin with: "log" and three
// digits, which no other id begins with. Empty if the state has one log.
std::string LogPrefix(const Front& front);
// Returns the log that an id names, or nullopt. Threads: any.
std::optional<int> LogOf(absl::string_view id);
// Returns an id for a session: 32 characters, of which LogPrefix is a part.
// Errors: those of NewId.
absl::StatusOr<std::string> NewSessionId(const Front& front);

// Answers a request and returns true if the session, model, sampling session,
// future or run that it names is not served here now: if it is on its way to or
// from another log, or another process has it. If that must be asked first,
// runs `serve` when no other process has it.
//
// An edge gets 421 with the owner's address, and sends the request there.
// Others get 503, after which the SDK tries again, perhaps by another address:
// 421 would end its request, and the address is that of an edge or of gRPC, to
// which it cannot be redirected. So a request goes one hop at most, even if two
// processes take each other for the owner.
bool IsElsewhere(Front& front, const Route& route, const CallPtr& call,
                 const Respond& respond, const std::function<void()>& serve);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_LOGS_H_
