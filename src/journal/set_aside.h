// Keeps the files of adapters that a start goes on without.
#ifndef WEFT_SRC_JOURNAL_SET_ASIDE_H_
#define WEFT_SRC_JOURNAL_SET_ASIDE_H_

#include <set>
#include <string>

#include "absl/status/status.h"
#include "src/journal/state_folder.h"

namespace weft::journal {

// The folder below the state folder. Nothing removes what is in it, and backups
// leave it out.
inline constexpr char kSetAsideFolder[] = "set-aside";

// Makes the folder set-aside/`name`, with the state's format, snapshots and log
// and those of `images` that exist. They are further links of the files, so
// they take room only once the state has removed its own. On success the
// folder is on disk. Errors: ALREADY_EXISTS, INVALID_ARGUMENT (`name` is not
// one part of a path), those of state_folder.h. Blocks on the disk. Threads: as
// for StateFolder::Cut.
[[nodiscard]] absl::Status SetAside(const StateFolder& folder,
                                    const std::string& name,
                                    const std::set<std::string>& images);

}  // namespace weft::journal

#endif  // WEFT_SRC_JOURNAL_SET_ASIDE_H_
