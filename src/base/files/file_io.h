// Reads files and writes them durably. Functions with a directory and a `name`
// do not follow a symbolic link of this name. Errors: INVALID_ARGUMENT (a name
// that CheckPathPart refuses), RESOURCE_EXHAUSTED (disk or quota full, no file
// descriptor left), NOT_FOUND, ALREADY_EXISTS, INTERNAL. Messages contain
// `what` or `name`.
#ifndef WEFT_SRC_BASE_FILES_FILE_IO_H_
#define WEFT_SRC_BASE_FILES_FILE_IO_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weft {

// Owns a file descriptor; -1 means none.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { Reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;

  int get() const { return fd_; }
  // Returns the descriptor and no longer owns it. The caller closes it.
  int Release() { return std::exchange(fd_, -1); }

 private:
  void Reset();

  int fd_ = -1;
};

// Converts an errno to a status. `what` tells what failed, such as "opening
// FORMAT".
absl::Status ErrnoStatus(int error, const std::string& what);

// Returns INVALID_ARGUMENT if `name` is not a single path component: it is
// empty, "." or "..", or has a '/' or a NUL.
absl::Status CheckPathPart(const std::string& name);

// Returns the bytes of the open file `name`. DATA_LOSS if it is not a plain
// file.
absl::StatusOr<uint64_t> FileSize(int fd, const std::string& name);

// Opens a directory, and follows symbolic links in `path`. OpenDirectoryAt
// opens the directory `name` in `parent`, and fails if `name` is a symbolic
// link.
absl::StatusOr<UniqueFd> OpenDirectory(const std::string& path,
                                       const std::string& what);
absl::StatusOr<UniqueFd> OpenDirectoryAt(int parent, const std::string& name);

absl::StatusOr<std::string> ReadFileAt(int dir, const std::string& name);

// Reads from `offset` until `bytes` is full or the file ends. Returns the
// number of bytes read.
absl::StatusOr<size_t> ReadAt(int fd, uint64_t offset, std::span<char> bytes,
                              const std::string& what);
// Writes all of `bytes` at `offset`.
absl::Status WriteAt(int fd, uint64_t offset, std::string_view bytes,
                     const std::string& what);

// Creates the file, writes it and syncs it to disk. Does not sync the
// directory. Errors: ALREADY_EXISTS.
absl::Status WriteFileAt(int dir, const std::string& name,
                         const std::string& contents);

// The beginning of the names of temporary files and folders. If a crash leaves
// some, RemoveStaleTemporaries (durable_folder.h) removes them.
inline constexpr char kTemporaryPrefix[] = ".tmp-";

// Writes all pieces, in order, to one file. Writes and syncs the file under a
// temporary name and then renames it, so on success the file is durable. After
// an error the file may exist. Errors: ALREADY_EXISTS if the file exists and
// `replace` is false; INVALID_ARGUMENT for a name that begins with
// kTemporaryPrefix. Threads: any, on different names.
absl::Status PublishFileAt(int dir, const std::string& name,
                           const std::vector<std::string_view>& pieces,
                           bool replace);

absl::Status RemoveFileAt(int dir, const std::string& name);

absl::Status SyncDirectory(int dir, const std::string& what);

}  // namespace weft

#endif  // WEFT_SRC_BASE_FILES_FILE_IO_H_
