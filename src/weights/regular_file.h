// Opens regular files, refuses FIFOs, devices and folders, and reads parts of
// files.
#ifndef WEFT_SRC_WEIGHTS_REGULAR_FILE_H_
#define WEFT_SRC_WEIGHTS_REGULAR_FILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace weft::weights {

// An open, read-only descriptor of a regular file, which the destructor closes.
// The file is never memory-mapped: if it is cut short while it is read, reading
// returns an error, but a mapping would end the process. Threads: any.
class RegularFile {
 public:
  // Errors: NOT_FOUND if there is no such file; INVALID_ARGUMENT if it is not a
  // regular file; otherwise PERMISSION_DENIED or INTERNAL. Each names the file.
  [[nodiscard]] static absl::StatusOr<RegularFile> Open(
      const std::string& path);

  RegularFile(RegularFile&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)),
        size_bytes_(other.size_bytes_),
        bytes_read_(other.bytes_read()) {}
  RegularFile& operator=(RegularFile&&) = delete;
  ~RegularFile();

  // Returns the size at the time of Open.
  [[nodiscard]] size_t size_bytes() const { return size_bytes_; }

  // Fills `destination` with the bytes from `offset` on. Errors: DATA_LOSS if
  // the file ends before, INTERNAL and others if reading fails. They do not
  // name the file.
  [[nodiscard]] absl::Status ReadAt(uint64_t offset,
                                    absl::Span<std::byte> destination) const;
  [[nodiscard]] absl::StatusOr<std::string> ReadBytes(uint64_t offset,
                                                      uint64_t num_bytes) const;

  // Returns the sum over all reads so far.
  [[nodiscard]] uint64_t bytes_read() const { return bytes_read_; }

 private:
  [[nodiscard]] absl::Status CheckRange(uint64_t offset,
                                        uint64_t num_bytes) const;

  RegularFile(int fd, size_t size_bytes) : fd_(fd), size_bytes_(size_bytes) {}

  int fd_;
  size_t size_bytes_;
  mutable std::atomic<uint64_t> bytes_read_ = 0;
};

// Returns the status with "PATH: " before its message.
[[nodiscard]] absl::Status InFile(const std::string& path,
                                  const absl::Status& status);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_REGULAR_FILE_H_
