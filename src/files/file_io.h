// Small files relative to an open directory: whole reads and durable writes
// that follow no symbolic links. Used by durable_folder.cc.
// Errors: RESOURCE_EXHAUSTED (ENOSPC, EDQUOT), NOT_FOUND, ALREADY_EXISTS,
// INTERNAL; messages name `what`, never a path.
#ifndef WEFT_SRC_FILES_FILE_IO_H_
#define WEFT_SRC_FILES_FILE_IO_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weft {

// Owns a file descriptor; -1: none.
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

  [[nodiscard]] int get() const { return fd_; }
  // Gives up the descriptor: the caller closes it.
  int Release() { return std::exchange(fd_, -1); }

 private:
  void Reset();

  int fd_ = -1;
};

// The status for an errno of an operation on `what`.
[[nodiscard]] absl::Status ErrnoStatus(int error, const std::string& what);

// INVALID_ARGUMENT unless `name` is one part of a path.
[[nodiscard]] absl::Status CheckPathPart(const std::string& name);

// `path` may follow links (it is the operator's).
[[nodiscard]] absl::StatusOr<UniqueFd> OpenDirectory(const std::string& path,
                                                     const std::string& what);
[[nodiscard]] absl::StatusOr<UniqueFd> OpenDirectoryAt(int parent,
                                                       const std::string& name);

[[nodiscard]] absl::StatusOr<std::string> ReadFileAt(int dir,
                                                     const std::string& name);

// Creates the file, writes it and syncs it to disk.
[[nodiscard]] absl::Status WriteFileAt(int dir, const std::string& name,
                                       const std::string& contents);

[[nodiscard]] absl::Status SyncDirectory(int dir, const std::string& what);

}  // namespace weft

#endif  // WEFT_SRC_FILES_FILE_IO_H_
