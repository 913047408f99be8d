// Opens regular files and reads parts of them. Refuses FIFOs, devices and
// folders.
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

// An open regular file for reading, which the destructor closes. Never maps the
// file into memory: if another process shortens the file, a read returns an
// error, but access to a mapping would end this process. Threads: any.
class RegularFile {
 public:
  // Opens the file. Errors: NOT_FOUND if it does not exist; INVALID_ARGUMENT if
  // it is not a regular file; otherwise those of absl::ErrnoToStatus. Messages
  // name the file.
  static absl::StatusOr<RegularFile> Open(const std::string& path);

  RegularFile(RegularFile&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)),
        size_bytes_(other.size_bytes_),
        bytes_read_(other.bytes_read()) {}
  RegularFile& operator=(RegularFile&&) = delete;
  ~RegularFile();

  // Returns the size at the time of Open.
  size_t size_bytes() const { return size_bytes_; }

  // Fills `destination` with the bytes from `offset` on. Errors: DATA_LOSS if
  // the file ends earlier, otherwise those of absl::ErrnoToStatus. Messages do
  // not name the file.
  absl::Status ReadAt(uint64_t offset, absl::Span<std::byte> destination) const;
  absl::StatusOr<std::string> ReadBytes(uint64_t offset,
                                        uint64_t num_bytes) const;

  // Returns the number of bytes that all reads so far have returned.
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  absl::Status CheckRange(uint64_t offset, uint64_t num_bytes) const;

  RegularFile(int fd, size_t size_bytes) : fd_(fd), size_bytes_(size_bytes) {}

  int fd_;
  size_t size_bytes_;
  mutable std::atomic<uint64_t> bytes_read_ = 0;
};

// Returns the status with "PATH: " before its message.
absl::Status InFile(const std::string& path, const absl::Status& status);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_REGULAR_FILE_H_
