// The life of the daemon between its flags and its exit status.
#ifndef WEFT_SERVER_DAEMON_H_
#define WEFT_SERVER_DAEMON_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "server/flags.h"
#include "server/local_ranks.h"
#include "src/engine/engine.h"

namespace weft {

using EngineStarter = std::function<absl::StatusOr<std::unique_ptr<Engine>>(
    const EngineOptions&, prometheus::Registry*)>;

// Listens at once (NOT_SERVING), starts the engine, serves until SIGTERM or
// SIGINT, drains (a second signal ends the wait), stops. When the engine fails,
// hangs for kHeartbeatLimit and kHangGrace, or one of the `others` ends, it
// turns NOT_SERVING, answers what waits and stops. Returns the exit status: 0
// after a clean drain, 1 when something could not start or has failed, 3 when
// work was cut off.
// Threads: the main thread; takes over SIGTERM, SIGINT and SIGPIPE.
[[nodiscard]] int RunDaemon(const Settings& settings,
                            const EngineStarter& start_engine,
                            LocalRanks* others);

// Follows rank 0; calls the second argument once it has met it.
using FollowerStarter = std::function<absl::Status(
    const EngineOptions&, const std::function<void()>& met)>;

// Runs `follow` to its end. A signal ends it at once until it has met rank 0,
// and not from then on: rank 0 drains first. Returns 0, or 1 when it fails.
// Threads: as RunDaemon.
[[nodiscard]] int RunFollower(const Settings& settings,
                              const FollowerStarter& follow);

}  // namespace weft

#endif  // WEFT_SERVER_DAEMON_H_
