// Reads and checks a whole state folder, so that an operator finds damage
// before a server needs the folder.
#ifndef WEFT_SRC_LOG_VERIFY_H_
#define WEFT_SRC_LOG_VERIFY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace weft::log {

struct StateReport {
  uint64_t adapters = 0;    // Adapters at the end of the log.
  uint64_t records = 0;     // Log records after the snapshot.
  uint64_t images = 0;      // Image files that records name.
  uint64_t bytes = 0;       // Bytes of the log and of images.
  uint64_t torn_bytes = 0;  // Bytes of unfinished records at the log's
                            // end, which the next start cuts off.
};

// Checks the snapshot, the log and all images that they name. Keeps the folder
// locked during the call. Errors: UNAVAILABLE while a server has the folder,
// NOT_FOUND if there is no state folder, FAILED_PRECONDITION for another format
// version, DATA_LOSS for damage, and those of StateFolder. The message of
// DATA_LOSS names the first damaged place. Blocks on the disk. Threads: any.
absl::StatusOr<StateReport> VerifyState(const std::string& path);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_VERIFY_H_
