// Stores blocks of floats in files when host memory is short. A file is written
// once, read back and removed. Files are not synced and do not outlive the
// process.
//
// Each process owns a folder <root>/<n>, with the smallest n that is free. It
// holds a lock on the folder, which ends with the process. So several processes
// may share a root. The next process that starts removes the folder of a
// crashed process.
//
// Errors: RESOURCE_EXHAUSTED (disk or quota full, no file descriptor left),
// NOT_FOUND, DATA_LOSS (a file that is too short), INTERNAL. Messages name the
// file, not its path.
// Threads: any, on different files. All functions block on the disk.
#ifndef WEFT_SRC_FILES_SPILL_FOLDER_H_
#define WEFT_SRC_FILES_SPILL_FOLDER_H_

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/files/file_io.h"

namespace weft {

class SpillFolder {
 public:
  // Creates `root` if it does not exist, and a folder of this process inside.
  // The parent of `root` must exist.
  [[nodiscard]] static absl::StatusOr<SpillFolder> Open(
      const std::string& root);
  // Removes the folder with its files.
  ~SpillFolder();
  SpillFolder(SpillFolder&&) = default;
  SpillFolder& operator=(SpillFolder&&) = delete;

  // Writes the blocks, in order, to a new file. After an error the file does
  // not exist.
  [[nodiscard]] absl::Status Write(
      const std::string& name,
      const std::vector<std::span<const float>>& blocks) const;
  // Reads the file into `blocks`, which must have the sizes of the blocks that
  // were written.
  [[nodiscard]] absl::Status Read(
      const std::string& name,
      const std::vector<std::span<float>>& blocks) const;
  [[nodiscard]] absl::Status Remove(const std::string& name) const;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  SpillFolder(std::string path, UniqueFd dir)
      : path_(std::move(path)), dir_(std::move(dir)) {}

  std::string path_;
  UniqueFd dir_;  // Holds the lock. Is empty after a move.
};

}  // namespace weft

#endif  // WEFT_SRC_FILES_SPILL_FOLDER_H_
