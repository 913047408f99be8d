// Runs the daemon, from its flags to its exit status.
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

// Listens at once (NOT_SERVING), starts the engine, and serves until SIGTERM or
// SIGINT. Then it drains, until a second signal at the latest, and stops. If
// the engine fails, hangs for kHeartbeatLimit plus kHangGrace, or one of the
// `others` ends, it turns NOT_SERVING, answers waiting calls and stops. Returns
// the exit status: 0 after a clean drain, 1 after a failed start or another
// failure, 3 if work was cut off. Threads: the main thread; takes over SIGTERM,
// SIGINT and SIGPIPE.
[[nodiscard]] int RunDaemon(const Settings& settings,
                            const EngineStarter& start_engine,
                            LocalRanks* others);

// Runs plans for rank 0 until it has no more. Calls `met` when it has met rank
// 0.
using RemoteWork = std::function<absl::Status(
    const EngineOptions&, const std::function<void()>& met)>;

// The process of a rank other than 0: runs `work` to its end. Before it has met
// rank 0, a signal ends it at once. Afterwards signals have no effect, because
// rank 0 drains first. Returns 0, or 1 if it fails. Threads: as for RunDaemon.
[[nodiscard]] int RunWorkerProcess(const Settings& settings,
                                   const RemoteWork& work);

}  // namespace weft

#endif  // WEFT_SERVER_DAEMON_H_
