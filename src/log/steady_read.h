// Reads a state whose server may write a snapshot meanwhile, and then remove
// what the snapshot replaces.
#ifndef WEFT_SRC_LOG_STEADY_READ_H_
#define WEFT_SRC_LOG_STEADY_READ_H_

#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "src/log/state.h"

namespace weft::log {

// Calls `read` with the newest snapshot, after which the log is to be read. If
// it fails and there is a newer snapshot by then, calls it again with that one.
// Errors: those of `read` and of ReadSnapshot; UNAVAILABLE after several such
// calls. Blocks as the state does.
absl::Status ReadSteadily(
    const State& state,
    const std::function<absl::Status(const std::optional<SnapshotFile>&)>&
        read);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_STEADY_READ_H_
