#include "src/files/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

absl::Status WriteAll(int fd, const std::string& contents,
                      const std::string& name) {
  size_t written = 0;
  while (written < contents.size()) {
    const ssize_t n =
        ::write(fd, contents.data() + written, contents.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "writing " + name);
    written += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

}  // namespace

void UniqueFd::Reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

absl::Status ErrnoStatus(int error, const std::string& what) {
  const std::string text =
      absl::StrCat(what, ": ", std::generic_category().message(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(text);
    case ENOENT:
      return absl::NotFoundError(text);
    case EEXIST:
      return absl::AlreadyExistsError(text);
    default:
      return absl::InternalError(text);
  }
}

absl::Status CheckPathPart(const std::string& name) {
  if (name.empty() || name == "." || name == ".." ||
      name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", name, "\" is not the name of a file or folder"));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> OpenDirectory(const std::string& path,
                                       const std::string& what) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, "opening " + what);
  return fd;
}

absl::StatusOr<UniqueFd> OpenDirectoryAt(int parent, const std::string& name) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  UniqueFd fd(::openat(parent, name.c_str(),
                       O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, "opening " + name);
  return fd;
}

absl::StatusOr<std::string> ReadFileAt(int dir, const std::string& name) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  // O_NONBLOCK: a FIFO in the file's place must not hang the reader.
  UniqueFd fd(::openat(dir, name.c_str(),
                       O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, "opening " + name);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) {
    return ErrnoStatus(errno, "reading " + name);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InternalError(absl::StrCat(name, " is not a plain file"));
  }
  std::string contents(static_cast<size_t>(info.st_size), '\0');
  size_t size = 0;
  while (size < contents.size()) {
    const ssize_t n =
        ::read(fd.get(), contents.data() + size, contents.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "reading " + name);
    if (n == 0) break;
    size += static_cast<size_t>(n);
  }
  contents.resize(size);
  return contents;
}

absl::Status WriteFileAt(int dir, const std::string& name,
                         const std::string& contents) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  UniqueFd fd(::openat(dir, name.c_str(),
                       O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                       0600));
  if (fd.get() < 0) return ErrnoStatus(errno, "creating " + name);
  WEFT_RETURN_IF_ERROR(WriteAll(fd.get(), contents, name));
  // A failed sync is final: the kernel may have dropped the dirty pages.
  if (::fsync(fd.get()) != 0) return ErrnoStatus(errno, "syncing " + name);
  if (::close(fd.Release()) != 0) return ErrnoStatus(errno, "closing " + name);
  return absl::OkStatus();
}

absl::Status SyncDirectory(int dir, const std::string& what) {
  if (::fsync(dir) != 0) return ErrnoStatus(errno, "syncing " + what);
  return absl::OkStatus();
}

}  // namespace weft
