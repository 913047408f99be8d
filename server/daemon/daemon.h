// Runs the daemon, from its settings to its exit status.
#ifndef WEFT_SERVER_DAEMON_DAEMON_H_
#define WEFT_SERVER_DAEMON_DAEMON_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "server/flags/flags.h"
#include "server/flags/local_ranks.h"
#include "src/engine/engine.h"

namespace weft::server {

using EngineStarter =
    std::function<absl::StatusOr<std::unique_ptr<engine::Engine>>(
        const EngineOptions&, prometheus::Registry*, const engine::OnStandby&)>;

// Runs the process of rank 0. Listens at once (readiness NOT_SERVING), starts
// the engine, and serves until SIGTERM or SIGINT. Then drains until all
// accepted work is done, the timeout has passed or a second signal comes.
// `others` are the processes of the other ranks. Stops without a drain if one
// of them ends, or if the engine fails or hangs for kHeartbeatLimit +
// kHangGrace. Returns the exit status: 0 after a complete drain, 1 after a
// failure, 3 if the drain was cut off, 4 if another process has taken the
// state over. A signal before the engine has started
// ends the process with status 0. Threads: the main thread; takes over SIGTERM,
// SIGINT, SIGPIPE.
int RunDaemon(const Settings& settings, const EngineStarter& start_engine,
              LocalRanks* others);

// The work of a rank other than 0: computes for rank 0 until rank 0 ends. Calls
// `met` when all ranks are connected.
using RemoteWork = std::function<absl::Status(
    const EngineOptions&, const std::function<void()>& met)>;

// Runs the process of a rank other than 0: calls `work` and waits for it.
// Before `work` calls `met`, SIGTERM or SIGINT ends the process with status 0.
// Afterwards these signals have no effect, because rank 0 drains and then ends
// the work. Returns 0, or 1 if `work` fails. Threads: the main thread.
int RunWorkerProcess(const Settings& settings, const RemoteWork& work);

}  // namespace weft::server

#endif  // WEFT_SERVER_DAEMON_DAEMON_H_
