// Writes a folder of files completely or not at all, and detects damage when it
// reads the folder.
//
// A write creates a temporary folder beside the final one. It writes the files
// and then MANIFEST.json (their sizes and SHA-256), syncs all to disk, and
// renames the folder. So after a crash at any point, the final folder is either
// the new one or the old one. If there was no old one, the final folder may be
// missing. The crash may leave the temporary folder, which
// RemoveStaleTemporaries removes.
//
// Errors: those of file_io.h. INVALID_ARGUMENT also means a reserved name: a
// folder name that begins with kTemporaryPrefix, or the file name
// MANIFEST.json. Messages contain no path.
#ifndef WEFT_SRC_BASE_FILES_DURABLE_FOLDER_H_
#define WEFT_SRC_BASE_FILES_DURABLE_FOLDER_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "src/base/files/file_source.h"

namespace weft {

struct DurableFolder {
  // Pairs of name and content, in the manifest's order.
  std::vector<std::pair<std::string, std::string>> files;
  // The caller's own data, which the manifest stores.
  nlohmann::json fields = nlohmann::json::object();
};

// A `parent` that is a symbolic link is refused, and lists no folders.

// Writes the folder `name` into the existing folder `parent`. Errors:
// ALREADY_EXISTS if `name` exists and `overwrite` is false.
absl::Status WriteDurableFolder(const std::string& parent,
                                const std::string& name,
                                const DurableFolder& folder, bool overwrite);

// Reads the folder and checks the size and SHA-256 of each file. Errors:
// NOT_FOUND; DATA_LOSS. The message of DATA_LOSS names the file or manifest
// that is missing, damaged or unreadable.
absl::StatusOr<DurableFolder> ReadDurableFolder(const std::string& parent,
                                                const std::string& name);

// A folder whose files stay on disk.
struct OpenedFolder {
  std::vector<FileSource> files;  // In the manifest's order.
  nlohmann::json fields;
};

// Opens the folder's files, and checks their sizes. They check their sums while
// they are read (CheckWhileRead). Errors: those of ReadDurableFolder.
absl::StatusOr<OpenedFolder> OpenDurableFolder(const std::string& parent,
                                               const std::string& name);

// Returns DurableFolder::fields from the manifest without reading the files.
// Errors: NOT_FOUND, DATA_LOSS.
absl::StatusOr<nlohmann::json> ReadDurableFields(const std::string& parent,
                                                 const std::string& name);

// Replaces DurableFolder::fields in the manifest, durably and completely or not
// at all. Errors: NOT_FOUND, DATA_LOSS, and those of writing a file.
absl::Status ReplaceDurableFields(const std::string& parent,
                                  const std::string& name,
                                  const nlohmann::json& fields);

struct ListedFolder {
  std::string name;
  std::string version;  // Another one after each change of the manifest.
};

// Returns the folders in `parent` that have a manifest, by name, without
// temporary folders and symbolic links. Returns none if `parent` does not
// exist. Reads no file.
absl::StatusOr<std::vector<ListedFolder>> ListDurableFolders(
    const std::string& parent);

// Removes the folder in one step (a rename), and then deletes its files.
// Errors: NOT_FOUND.
absl::Status RemoveDurableFolder(const std::string& parent,
                                 const std::string& name);

// Removes the temporary files and folders in `parent`. Call it before any
// write, because it would also remove those of a running write.
absl::Status RemoveStaleTemporaries(const std::string& parent);

}  // namespace weft

#endif  // WEFT_SRC_BASE_FILES_DURABLE_FOLDER_H_
