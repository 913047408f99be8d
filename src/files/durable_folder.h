// Folders that are written completely or not at all. Reading detects damage.
//
// A write puts the files and then MANIFEST.json (sizes, SHA-256) into a
// temporary sibling, syncs everything to disk, and renames the sibling. So a
// crash at any point leaves the old folder or the new one, and at most a
// temporary that RemoveStaleTemporaries removes. A read checks every byte.
//
// Errors of all functions: INVALID_ARGUMENT (a name with '/', "." and the
// like), RESOURCE_EXHAUSTED (disk or quota full, no file descriptor left),
// INTERNAL (other input/output errors). Messages name the folder and the file,
// not their path.
// Threads: any, on different folders. The caller orders calls on one folder.
// Functions block on the disk.
#ifndef WEFT_SRC_FILES_DURABLE_FOLDER_H_
#define WEFT_SRC_FILES_DURABLE_FOLDER_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace weft {

struct DurableFolder {
  // (name, contents), in the manifest's order.
  std::vector<std::pair<std::string, std::string>> files;
  // The writer's own fields, stored in the manifest.
  nlohmann::json fields = nlohmann::json::object();
};

// Writes `parent`/`name`; `parent` exists. ALREADY_EXISTS unless `overwrite`.
[[nodiscard]] absl::Status WriteDurableFolder(const std::string& parent,
                                              const std::string& name,
                                              const DurableFolder& folder,
                                              bool overwrite);

// Errors: NOT_FOUND, DATA_LOSS. DATA_LOSS names the manifest, or the file that
// is missing or differs from the manifest in size or content.
[[nodiscard]] absl::StatusOr<DurableFolder> ReadDurableFolder(
    const std::string& parent, const std::string& name);

// Returns the manifest's fields without reading the files.
[[nodiscard]] absl::StatusOr<nlohmann::json> ReadDurableFields(
    const std::string& parent, const std::string& name);

// Returns the sorted names of the folders with a manifest; none if `parent`
// does not exist.
[[nodiscard]] absl::StatusOr<std::vector<std::string>> ListDurableFolders(
    const std::string& parent);

// Removes the folder in one step, then its files. Errors: NOT_FOUND.
[[nodiscard]] absl::Status RemoveDurableFolder(const std::string& parent,
                                               const std::string& name);

// Removes what interrupted writes left. Call it at the start, before any write.
[[nodiscard]] absl::Status RemoveStaleTemporaries(const std::string& parent);

}  // namespace weft

#endif  // WEFT_SRC_FILES_DURABLE_FOLDER_H_
