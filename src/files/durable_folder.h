// Writes a folder of files completely or not at all, and detects damage when it
// reads the folder.
//
// A write creates a temporary folder beside the final one. It writes the files
// and then MANIFEST.json (their sizes and SHA-256), syncs all to disk, and
// renames the folder. So a crash at any point leaves the old folder or the new
// one. It may also leave the temporary folder, which RemoveStaleTemporaries
// removes. A read checks every byte.
//
// Errors of all functions: INVALID_ARGUMENT (a name that is reserved or is not
// one part of a path), RESOURCE_EXHAUSTED (disk or quota full, no file
// descriptor left), INTERNAL (other input/output errors). Messages name the
// folder and the file, not their path.
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
  // The caller's own data, which the manifest stores.
  nlohmann::json fields = nlohmann::json::object();
};

// Writes the folder `name` into the existing folder `parent`. Errors:
// ALREADY_EXISTS if `name` exists and `overwrite` is false.
[[nodiscard]] absl::Status WriteDurableFolder(const std::string& parent,
                                              const std::string& name,
                                              const DurableFolder& folder,
                                              bool overwrite);

// Reads the folder and checks its files. Errors: NOT_FOUND, DATA_LOSS. The
// message of DATA_LOSS names the manifest, or the file that is missing or has
// another size or content.
[[nodiscard]] absl::StatusOr<DurableFolder> ReadDurableFolder(
    const std::string& parent, const std::string& name);

// Returns DurableFolder::fields from the manifest without reading the files.
[[nodiscard]] absl::StatusOr<nlohmann::json> ReadDurableFields(
    const std::string& parent, const std::string& name);

// Returns the sorted names of the folders in `parent` that have a manifest.
// Returns no names if `parent` does not exist.
[[nodiscard]] absl::StatusOr<std::vector<std::string>> ListDurableFolders(
    const std::string& parent);

// Removes the folder in one step (a rename), and then deletes its files.
// Errors: NOT_FOUND.
[[nodiscard]] absl::Status RemoveDurableFolder(const std::string& parent,
                                               const std::string& name);

// Removes the temporary folders of interrupted writes. Call it at the start,
// before any write.
[[nodiscard]] absl::Status RemoveStaleTemporaries(const std::string& parent);

}  // namespace weft

#endif  // WEFT_SRC_FILES_DURABLE_FOLDER_H_
