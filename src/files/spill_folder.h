// Files that extend memory: blocks of floats that are written once, read back,
// and removed. They are not synced and do not outlive the process.
//
// A process owns the folder <root>/<n>, with the smallest free n, by a lock
// that ends with the process. So processes may share a root, and the next start
// removes what a crashed process left.
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
  // Creates `root` if it does not exist; its parent exists.
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
  // Reads the blocks, which have the sizes that were written.
  [[nodiscard]] absl::Status Read(
      const std::string& name,
      const std::vector<std::span<float>>& blocks) const;
  [[nodiscard]] absl::Status Remove(const std::string& name) const;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  SpillFolder(std::string path, UniqueFd dir)
      : path_(std::move(path)), dir_(std::move(dir)) {}

  std::string path_;
  UniqueFd dir_;  // Holds the lock. Empty after a move.
};

}  // namespace weft

#endif  // WEFT_SRC_FILES_SPILL_FOLDER_H_
