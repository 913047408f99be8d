// The life of the daemon between its flags and its exit status.
#ifndef WEFT_SERVER_DAEMON_H_
#define WEFT_SERVER_DAEMON_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "server/flags.h"
#include "src/engine/engine.h"

namespace weft {

using EngineStarter = std::function<absl::StatusOr<std::unique_ptr<Engine>>(
    const EngineOptions&, prometheus::Registry*)>;

// Listens at once (NOT_SERVING), starts the engine, serves until SIGTERM or
// SIGINT, drains (a second signal ends the wait), stops. Returns the exit
// status: 0 after a clean drain, 1 when something could not start, 3 when work
// was cut off.
// Threads: the main thread; takes over SIGTERM, SIGINT and SIGPIPE.
[[nodiscard]] int RunDaemon(const Settings& settings,
                            const EngineStarter& start_engine);

}  // namespace weft

#endif  // WEFT_SERVER_DAEMON_H_
