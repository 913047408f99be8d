// Copies a state folder, even while a server uses it.
#ifndef WEFT_SRC_JOURNAL_BACKUP_H_
#define WEFT_SRC_JOURNAL_BACKUP_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace weft::journal {

struct BackupReport {
  uint64_t files = 0;
  uint64_t bytes = 0;
};

// Copies the state folder `from` to the new folder `to`, which may be on
// another disk. The copy shows the folder at one moment: it has every record
// that was durable when the call began. On success the copy is on disk. A
// failed call removes the files that it has copied.
// Errors: ALREADY_EXISTS (`to`), NOT_FOUND (`from` is absent or not a state
// folder), UNAVAILABLE (a snapshot was written during each of several tries),
// and those of file_io.h.
// Blocks on both disks. Threads: any.
[[nodiscard]] absl::StatusOr<BackupReport> BackUp(const std::string& from,
                                                  const std::string& to);

}  // namespace weft::journal

#endif  // WEFT_SRC_JOURNAL_BACKUP_H_
