// Stores blocks of floats in files, so that they need no host memory. Files are
// not synced, and a restart does not find them again.
//
// Each process owns a folder <root>/<n>, where n is a free number. The process
// locks its folder, and the lock ends with the process. So several processes
// may share a root. The destructor removes the folder. After a crash, the next
// Open with this root removes the folder.
//
// Errors: RESOURCE_EXHAUSTED (disk or quota full, no file descriptor left),
// NOT_FOUND, ALREADY_EXISTS, DATA_LOSS (a file that is too short), INTERNAL.
// Messages contain no path.
// Threads: any, on different files. All functions but path() block on the disk.
#ifndef WEFT_SRC_BASE_FILES_SPILL_FOLDER_H_
#define WEFT_SRC_BASE_FILES_SPILL_FOLDER_H_

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/files/file_io.h"

namespace weft {

class SpillFolder {
 public:
  // Creates `root` if it does not exist, and creates this process's folder in
  // `root`. The parent of `root` must exist.
  static absl::StatusOr<SpillFolder> Open(const std::string& root);
  // Removes the folder with its files.
  ~SpillFolder();
  SpillFolder(SpillFolder&&) = default;
  SpillFolder& operator=(SpillFolder&&) = delete;

  // Writes the blocks, in order, to a new file. On error, leaves no new file.
  absl::Status Write(const std::string& name,
                     const std::vector<std::span<const float>>& blocks) const;
  // Reads the file into `blocks`, which must have the sizes of the blocks that
  // were written.
  absl::Status Read(const std::string& name,
                    const std::vector<std::span<float>>& blocks) const;
  absl::Status Remove(const std::string& name) const;
  const std::string& path() const { return path_; }

 private:
  SpillFolder(std::string path, UniqueFd dir)
      : path_(std::move(path)), dir_(std::move(dir)) {}

  std::string path_;
  UniqueFd dir_;  // Holds the lock. Is empty after a move.
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_FILES_SPILL_FOLDER_H_
