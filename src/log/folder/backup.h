// Copies a state folder, even while a server uses it.
#ifndef WEFT_SRC_LOG_FOLDER_BACKUP_H_
#define WEFT_SRC_LOG_FOLDER_BACKUP_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weft::log {

struct BackupReport {
  uint64_t files = 0;
  uint64_t bytes = 0;
};

// Copies the state folder `from`, without LOCK, to the new folder `to`, which
// may be on another disk. The copy has every record that was durable when the
// call began. Removes `to`.partial if it exists, makes the copy there, and
// renames the copy to `to`. If copying fails, removes the partial copy. On
// success the copy is durable under the name `to`: BackUp has synced its files
// and folders and the parent folder of `to`. If only the sync of this parent
// fails, `to` exists.
// Errors: ALREADY_EXISTS (`to`), NOT_FOUND (`from` is absent or not a state
// folder), INVALID_ARGUMENT (`to` is within `from`), UNAVAILABLE (a snapshot
// was written during each of several tries), DATA_LOSS (a file became shorter),
// and those of file_io.h.
// Blocks on both disks. Threads: any.
absl::StatusOr<BackupReport> BackUp(const std::string& from,
                                    const std::string& to);

// Makes the folder `to` as BackUp does: calls `fill` with the name of a draft
// beside it, which does not exist, and renames what `fill` has made there.
// Errors: ALREADY_EXISTS, and those of `fill` and of file_io.h.
absl::Status MakeWholeFolder(
    const std::string& to,
    const std::function<absl::Status(const std::string& draft)>& fill);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_FOLDER_BACKUP_H_
