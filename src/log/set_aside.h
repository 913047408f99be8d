// Keeps the files of damaged adapters after the operator has given up these
// adapters with --recover-adapter.
#ifndef WEFT_SRC_LOG_SET_ASIDE_H_
#define WEFT_SRC_LOG_SET_ASIDE_H_

#include <set>
#include <string>

#include "absl/status/status.h"
#include "src/log/state_folder.h"

namespace weft::journal {

// A folder in the state folder, for the files that are set aside. Nothing
// removes these files, and backups do not contain them.
inline constexpr char kSetAsideFolder[] = "set-aside";

// Makes the folder set-aside/`name`, with FORMAT, all snapshots, the log and
// the existing files of `images`. The files are hard links to those of the
// state folder. A link takes disk space only after the state folder has removed
// the linked file. On success the new folder is on disk. Errors:
// ALREADY_EXISTS, INVALID_ARGUMENT (`name` is not a single path component),
// those of state_folder.h. Blocks on the disk. Threads: not during
// StateFolder::WriteSnapshot or Cut.
[[nodiscard]] absl::Status SetAside(const StateFolder& folder,
                                    const std::string& name,
                                    const std::set<std::string>& images);

}  // namespace weft::journal

#endif  // WEFT_SRC_LOG_SET_ASIDE_H_
