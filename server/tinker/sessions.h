// Handles sessions, and the requests that need no model: configuration,
// capabilities, health, telemetry.
// Threads: the front's. Any
// thread may call NewId.
#ifndef WEFT_SERVER_TINKER_SESSIONS_H_
#define WEFT_SERVER_TINKER_SESSIONS_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/tinker/front.h"

namespace weft::tinker {

// A session ends if it has no heartbeat for this time.
inline constexpr absl::Duration kSessionTimeout = absl::Hours(1);
// One owner may have at most this many sessions. Above the limit, a new session
// ends the session that has been silent for longest, among those that the
// caller may end. But if none of these has been silent for kSilence, the new
// session is refused. The SDK sends about thirty heartbeats in kSilence.
inline constexpr size_t kMaxSessions = 1000;
inline constexpr absl::Duration kSilence = absl::Minutes(5);

// Responds "ok". Errors: UNAVAILABLE while the engine starts or drains.
[[nodiscard]] absl::Status GetHealth(Front& front, const CallPtr& call,
                                     const Respond& respond);
// Respond with the settings that the SDK asks for, and with the model that the
// server runs. GetCapabilities has the errors of GetHealth.
[[nodiscard]] absl::Status GetClientConfig(Front& front, const CallPtr& call,
                                           const Respond& respond);
[[nodiscard]] absl::Status GetDynamicConfig(Front& front, const CallPtr& call,
                                            const Respond& respond);
[[nodiscard]] absl::Status GetCapabilities(Front& front, const CallPtr& call,
                                           const Respond& respond);
// Accepts telemetry and drops it.
[[nodiscard]] absl::Status TakeTelemetry(Front& front, const CallPtr& call,
                                         const Respond& respond);

// Makes a session, writes it to the ledger, and then responds with its id or
// the error of the write. If a request of the owner with the same idempotency
// key has made a session that has not ended, responds with this session's id.
// Errors: RESOURCE_EXHAUSTED if the owner has
// kMaxSessions sessions, and none of them may be ended; the errors of NewId.
[[nodiscard]] absl::Status CreateSession(Front& front, const CallPtr& call,
                                         const Respond& respond);
// Takes a heartbeat. Errors: ABORTED (410) if the session is unknown, so that
// the client sends no more heartbeats.
[[nodiscard]] absl::Status BeatSession(Front& front, const CallPtr& call,
                                       const Respond& respond);
// Ends a session with its models and sampling sessions. Does nothing if the
// session has ended already. Errors: PERMISSION_DENIED if the session has
// models and the token lacks the scope train, or if the session has sampling
// sessions and the token lacks both the scope sample and the scope train.
[[nodiscard]] absl::Status FinishSession(Front& front, const CallPtr& call,
                                         const Respond& respond);
// Responds with a page of the ids of the caller's sessions.
[[nodiscard]] absl::Status ListSessions(Front& front, const CallPtr& call,
                                        const Respond& respond);
// Refuse to move a session to a project, and to export a session's trace.
[[nodiscard]] absl::Status RefuseProject(Front& front, const CallPtr& call,
                                         const Respond& respond);
[[nodiscard]] absl::Status RefuseTrace(Front& front, const CallPtr& call,
                                       const Respond& respond);
// Responds with the ids of a session's models and sampling sessions, and with
// the metadata and the name that the client gave the session.
[[nodiscard]] absl::Status GetSession(Front& front, const CallPtr& call,
                                      const Respond& respond);

// Returns 128 random bits in hex. Ids name adapters, folders and futures, so
// none may repeat. Errors: INTERNAL if the system has no random bits.
[[nodiscard]] absl::StatusOr<std::string> NewId();

// Ends the sessions that have had no heartbeat for more than kSessionTimeout.
void SweepSessions(Front& front, absl::Time now);

// Reads the sessions from the ledger. Each session starts as if its last
// heartbeat had come at `now`.
void RestoreSessions(Front& front, absl::Time now);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SESSIONS_H_
