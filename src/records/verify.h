// Reads a whole state folder, to find damage before a start needs it.
#ifndef WEFT_SRC_RECORDS_VERIFY_H_
#define WEFT_SRC_RECORDS_VERIFY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace weft::records {

struct StateReport {
  uint64_t adapters = 0;  // At the end of the log.
  uint64_t records = 0;   // In the log after the snapshot.
  uint64_t images = 0;
  uint64_t bytes = 0;       // In log and images.
  uint64_t torn_bytes = 0;  // At the log's end; a start cuts them.
};

// Reads snapshot, log and every image that they name. Locks the folder
// meanwhile.
// Errors: UNAVAILABLE while a server has the folder, NOT_FOUND when it or an
// image is missing, DATA_LOSS with the place of the damage, FAILED_PRECONDITION
// for another format version.
// Blocks on the disk. Threads: any.
[[nodiscard]] absl::StatusOr<StateReport> VerifyState(const std::string& path);

}  // namespace weft::records

#endif  // WEFT_SRC_RECORDS_VERIFY_H_
