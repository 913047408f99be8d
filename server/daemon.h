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
// SIGINT, drains (a second signal ends the wait), stops. When the engine fails
// or one of the `others` ends it turns NOT_SERVING, answers what waits and
// stops. Returns the exit status: 0 after a clean drain, 1 when something could
// not start or has failed, 3 when work was cut off.
// Threads: the main thread; takes over SIGTERM, SIGINT and SIGPIPE.
[[nodiscard]] int RunDaemon(const Settings& settings,
                            const EngineStarter& start_engine,
                            LocalRanks* others);

// Runs `follow` to its end. Signals do not end it: rank 0 drains first. Returns
// 0, or 1 when it fails.
// Threads: as RunDaemon.
[[nodiscard]] int RunFollower(
    const Settings& settings,
    const std::function<absl::Status(const EngineOptions&)>& follow);

}  // namespace weft

#endif  // WEFT_SERVER_DAEMON_H_
