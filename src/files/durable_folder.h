// Writes folders completely or not at all. Reading detects damage.
//
// A write puts the files and then MANIFEST.json (sizes, SHA-256) into a
// temporary sibling, syncs everything to disk, and renames the sibling. So a
// crash at any point leaves the old folder or the new one. It may also leave a
// temporary, which RemoveStaleTemporaries removes. A read checks every byte.
//
// Errors of all functions: INVALID_ARGUMENT (a name that is not one part of a
// path), RESOURCE_EXHAUSTED (disk or quota full, no file descriptor left),
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
  // Pairs of name and content, in the manifest's order.
  std::vector<std::pair<std::string, std::string>> files;
  // The caller's own fields, which the manifest stores.
  nlohmann::json fields = nlohmann::json::object();
};

// Writes `parent`/`name`; `parent` exists. Errors: ALREADY_EXISTS without
// `overwrite`.
[[nodiscard]] absl::Status WriteDurableFolder(const std::string& parent,
                                              const std::string& name,
                                              const DurableFolder& folder,
                                              bool overwrite);

// Errors: NOT_FOUND, DATA_LOSS. The message of DATA_LOSS names the manifest or
// the file that is missing or has another size or content.
[[nodiscard]] absl::StatusOr<DurableFolder> ReadDurableFolder(
    const std::string& parent, const std::string& name);

// Returns the manifest's fields without reading the files.
[[nodiscard]] absl::StatusOr<nlohmann::json> ReadDurableFields(
    const std::string& parent, const std::string& name);

// Returns the sorted names of the folders that have a manifest; none if
// `parent` does not exist.
[[nodiscard]] absl::StatusOr<std::vector<std::string>> ListDurableFolders(
    const std::string& parent);

// Removes the folder in one step, and then its files. Errors: NOT_FOUND.
[[nodiscard]] absl::Status RemoveDurableFolder(const std::string& parent,
                                               const std::string& name);

// Removes the temporaries of interrupted writes. Call it at the start, before
// any write.
[[nodiscard]] absl::Status RemoveStaleTemporaries(const std::string& parent);

}  // namespace weft

#endif  // WEFT_SRC_FILES_DURABLE_FOLDER_H_
