#include "src/weights/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft::weights {

absl::StatusOr<RegularFile> RegularFile::Open(const std::string& path) {
  // Without O_NONBLOCK, opening a FIFO that has no writer would block.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && errno == ELOOP) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is a link that leads to no file"));
  }
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("open ", path));
  RegularFile file(fd, 0);
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("stat ", path));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not a regular file"));
  }
  file.size_bytes_ = static_cast<size_t>(info.st_size);
  return file;
}

RegularFile::~RegularFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status RegularFile::CheckRange(uint64_t offset,
                                     uint64_t num_bytes) const {
  if (offset <= size_bytes_ && num_bytes <= size_bytes_ - offset) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat(num_bytes, " bytes from byte ",
                                          offset, " on are wanted of ",
                                          size_bytes_));
}

absl::Status RegularFile::ReadAt(uint64_t offset,
                                 absl::Span<std::byte> destination) const {
  WEFT_RETURN_IF_ERROR(CheckRange(offset, destination.size()));
  size_t done = 0;
  while (done < destination.size()) {
    const ssize_t count =
        pread(fd_, destination.data() + done, destination.size() - done,
              static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::ErrnoToStatus(errno, "read");
    if (count == 0) {
      return absl::DataLossError(
          absl::StrCat("ended at byte ", offset + done, " of ", size_bytes_));
    }
    done += static_cast<size_t>(count);
  }
  bytes_read_ += done;
  return absl::OkStatus();
}

absl::StatusOr<std::string> RegularFile::ReadBytes(uint64_t offset,
                                                   uint64_t num_bytes) const {
  // Checks the range before it allocates, because the size comes from a file.
  WEFT_RETURN_IF_ERROR(CheckRange(offset, num_bytes));
  std::string bytes(num_bytes, '\0');
  WEFT_RETURN_IF_ERROR(
      ReadAt(offset, absl::MakeSpan(reinterpret_cast<std::byte*>(bytes.data()),
                                    bytes.size())));
  return bytes;
}

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(path, ": ", status.message()));
}

}  // namespace weft::weights
