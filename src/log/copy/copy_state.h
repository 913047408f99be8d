// Copies a state between a folder and an object store, or between two stores,
// also while a server uses the source. A copy has every record that was durable
// when the call began, and ends the moves of adapters that are open, so that
// they stay. What is not whole is no state: a server refuses it.
//
// Errors: DATA_LOSS (the source is damaged), UNAVAILABLE (a snapshot was
// written during each of several tries), and those of state.h. Blocks as both
// states do. Threads: any.
#ifndef WEFT_SRC_LOG_COPY_COPY_STATE_H_
#define WEFT_SRC_LOG_COPY_COPY_STATE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/log/state.h"
#include "src/store/object_store.h"

namespace weft::log {

struct CopyReport {
  uint64_t records = 0;  // Log records after the snapshot.
  uint64_t images = 0;
  uint64_t bytes = 0;  // Of snapshot, records and images.
};

// Copies to the new folder `to`, as BackUp (folder/backup.h) does. Errors:
// ALREADY_EXISTS.
absl::StatusOr<CopyReport> CopyToFolder(const State& from,
                                        const std::string& to);

// Copies to a store without objects, and releases the log there, so that a
// server can begin at once. After an error, objects remain that no server
// takes for a state. Errors: FAILED_PRECONDITION (there are objects, or the
// store does not keep conditions), ABORTED (another process writes there, too).
absl::StatusOr<CopyReport> CopyToStore(const State& from,
                                       std::unique_ptr<store::ObjectStore> to);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_COPY_COPY_STATE_H_
