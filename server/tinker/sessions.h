// Sessions, and what a client asks before it trains: configuration,
// capabilities, health, telemetry.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SESSIONS_H_
#define WEFT_SERVER_TINKER_SESSIONS_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/tinker/front.h"

namespace weft::tinker {

// A session without heartbeats for this long is ended as if it had finished.
inline constexpr absl::Duration kSessionTimeout = absl::Hours(1);
// Sessions of one owner. A further one ends the one that has been silent for
// longest, if that is for kSilence, in which a client beats thirty times.
inline constexpr size_t kMaxSessions = 1000;
inline constexpr absl::Duration kSilence = absl::Minutes(5);

[[nodiscard]] absl::Status GetHealth(Front& front, const CallPtr& call,
                                     const Respond& respond);
[[nodiscard]] absl::Status GetClientConfig(Front& front, const CallPtr& call,
                                           const Respond& respond);
[[nodiscard]] absl::Status GetDynamicConfig(Front& front, const CallPtr& call,
                                            const Respond& respond);
[[nodiscard]] absl::Status GetCapabilities(Front& front, const CallPtr& call,
                                           const Respond& respond);
// Telemetry is accepted and thrown away.
[[nodiscard]] absl::Status TakeTelemetry(Front& front, const CallPtr& call,
                                         const Respond& respond);

[[nodiscard]] absl::Status CreateSession(Front& front, const CallPtr& call,
                                         const Respond& respond);
// 410 for a session that is not known: the client stops its heartbeats.
[[nodiscard]] absl::Status BeatSession(Front& front, const CallPtr& call,
                                       const Respond& respond);
[[nodiscard]] absl::Status FinishSession(Front& front, const CallPtr& call,
                                         const Respond& respond);
[[nodiscard]] absl::Status ListSessions(Front& front, const CallPtr& call,
                                        const Respond& respond);
// What a hosted service has beside training.
[[nodiscard]] absl::Status RefuseAccounts(Front& front, const CallPtr& call,
                                          const Respond& respond);
[[nodiscard]] absl::Status GetSession(Front& front, const CallPtr& call,
                                      const Respond& respond);

// Returns 128 random bits in hex: ids name adapters, folders and futures, so
// they never repeat. Errors: INTERNAL. Threads: any.
[[nodiscard]] absl::StatusOr<std::string> NewId();

// Ends sessions whose time is over.
void SweepSessions(Front& front, absl::Time now);

// Takes up the sessions of the ledger, as if they had just had a heartbeat.
void RestoreSessions(Front& front, absl::Time now);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SESSIONS_H_
