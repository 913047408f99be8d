// Opening files without being caught by a FIFO, a device or a folder.
#ifndef WEFT_SRC_WEIGHTS_REGULAR_FILE_H_
#define WEFT_SRC_WEIGHTS_REGULAR_FILE_H_

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace weft::weights {

// An open, read-only descriptor of a regular file; closes it when destroyed.
class RegularFile {
 public:
  // Errors: NOT_FOUND when there is no such file; INVALID_ARGUMENT when it is
  // not a regular file; PERMISSION_DENIED or INTERNAL otherwise. Each names it.
  [[nodiscard]] static absl::StatusOr<RegularFile> Open(
      const std::string& path);

  RegularFile(RegularFile&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), size_bytes_(other.size_bytes_) {}
  RegularFile& operator=(RegularFile&&) = delete;
  ~RegularFile();

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] size_t size_bytes() const { return size_bytes_; }

 private:
  RegularFile(int fd, size_t size_bytes) : fd_(fd), size_bytes_(size_bytes) {}

  int fd_;
  size_t size_bytes_;
};

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_REGULAR_FILE_H_
