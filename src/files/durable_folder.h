// Folders that are there completely or not at all, and whose damage is noticed.
//
// Writing: a temporary sibling gets the files and then MANIFEST.json (sizes,
// SHA-256), everything is synced to disk, and one rename makes it visible; so a
// crash at any point leaves the old folder or the new one, and at most a
// temporary that RemoveStaleTemporaries clears. Reading checks every byte.
//
// Errors of all functions: INVALID_ARGUMENT (a name with '/', "." and the
// like), RESOURCE_EXHAUSTED (disk or quota full, no file descriptor left),
// INTERNAL (other input/output errors); they name the folder and the file, not
// the path to them.
// Threads: any, on different folders; calls on one folder need the caller's
// order. They block on the disk.
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
  // What the writer wants to find again; stored inside the manifest.
  nlohmann::json fields = nlohmann::json::object();
};

// Writes `parent`/`name`; `parent` exists. ALREADY_EXISTS unless `overwrite`.
[[nodiscard]] absl::Status WriteDurableFolder(const std::string& parent,
                                              const std::string& name,
                                              const DurableFolder& folder,
                                              bool overwrite);

// NOT_FOUND; DATA_LOSS naming the file that is missing, of another size, or of
// other contents than the manifest says, or the manifest itself.
[[nodiscard]] absl::StatusOr<DurableFolder> ReadDurableFolder(
    const std::string& parent, const std::string& name);

// The manifest's fields alone, without reading the files.
[[nodiscard]] absl::StatusOr<nlohmann::json> ReadDurableFields(
    const std::string& parent, const std::string& name);

// Names of the folders with a manifest, sorted; none when `parent` is missing.
[[nodiscard]] absl::StatusOr<std::vector<std::string>> ListDurableFolders(
    const std::string& parent);

// NOT_FOUND. The folder vanishes at once, then its files go.
[[nodiscard]] absl::Status RemoveDurableFolder(const std::string& parent,
                                               const std::string& name);

// Removes what interrupted writes left; at start-up, before any write.
[[nodiscard]] absl::Status RemoveStaleTemporaries(const std::string& parent);

}  // namespace weft

#endif  // WEFT_SRC_FILES_DURABLE_FOLDER_H_
