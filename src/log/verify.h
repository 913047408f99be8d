// Reads and checks a whole state, so that an operator finds damage
// before a server needs it.
#ifndef WEFT_SRC_LOG_VERIFY_H_
#define WEFT_SRC_LOG_VERIFY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "src/log/state.h"

namespace weft::log {

struct StateReport {
  uint64_t adapters = 0;    // Adapters at the end of the log.
  uint64_t records = 0;     // Log records after the snapshot.
  uint64_t images = 0;      // Images that records name.
  uint64_t bytes = 0;       // Bytes of the log and of images.
  uint64_t torn_bytes = 0;  // Bytes of unfinished records at the log's
                            // end, which the next start cuts off.
};

// Checks the snapshot, the log and all images that they name, also while a
// server uses the state. Errors:
// DATA_LOSS for damage, whose message names the first damaged place, and those
// of state.h. Blocks as the state does. Threads: any.
absl::StatusOr<StateReport> VerifyState(const State& state);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_VERIFY_H_
