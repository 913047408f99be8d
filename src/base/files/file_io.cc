#include "src/base/files/file_io.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/file_source.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

absl::StatusOr<UniqueFd> CreateFileAt(int dir, const std::string& name) {
  UniqueFd fd;
  if (!Failpoint("files.create")) {
    fd = UniqueFd(::openat(dir, name.c_str(),
                           O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                           0600));
  }
  if (fd.get() < 0) return ErrnoStatus(errno, "creating " + name);
  return fd;
}

absl::Status WritePieces(UniqueFd fd, const std::string& name,
                         std::span<const std::string_view> pieces) {
  uint64_t offset = 0;
  for (const std::string_view piece : pieces) {
    WEFT_RETURN_IF_ERROR(WriteAt(fd.get(), offset, piece, name));
    offset += piece.size();
  }
  // Does not repeat a failed fsync: the kernel may have dropped the unwritten
  // pages, and a second fsync could succeed without them.
  if (Failpoint("files.sync") || ::fsync(fd.get()) != 0) {
    return ErrnoStatus(errno, "syncing " + name);
  }
  if (Failpoint("files.close") || ::close(fd.Release()) != 0) {
    return ErrnoStatus(errno, "closing " + name);
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
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(text);
    case ENOENT:
      return absl::NotFoundError(text);
    case EEXIST:
      return absl::AlreadyExistsError(text);
    default:
      return absl::InternalError(text);
  }
}

absl::StatusOr<uint64_t> FileSize(int fd, const std::string& name) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return ErrnoStatus(errno, "reading " + name);
  if (!S_ISREG(info.st_mode)) {
    return absl::DataLossError(name + " is not a plain file");
  }
  return static_cast<uint64_t>(info.st_size);
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
  WEFT_ASSIGN_OR_RETURN(const FileSource file, FileSource::OpenAt(dir, name));
  return file.Read(0, file.size());
}

absl::StatusOr<size_t> ReadAt(int fd, uint64_t offset, std::span<char> bytes,
                              const std::string& what) {
  size_t size = 0;
  while (size < bytes.size()) {
    const ssize_t n =
        Failpoint("files.read")
            ? -1
            : ::pread(fd, bytes.data() + size, bytes.size() - size,
                      static_cast<off_t>(offset + size));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "reading " + what);
    if (n == 0) break;
    size += static_cast<size_t>(n);
  }
  return size;
}

absl::Status WriteAt(int fd, uint64_t offset, std::string_view bytes,
                     const std::string& what) {
  while (!bytes.empty()) {
    size_t size = bytes.size();
    const ssize_t n =
        Failpoint("files.write", &size)
            ? -1
            : ::pwrite(fd, bytes.data(), size, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "writing " + what);
    bytes.remove_prefix(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

absl::Status WriteFileAt(int dir, const std::string& name,
                         const std::string& contents) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  WEFT_ASSIGN_OR_RETURN(UniqueFd fd, CreateFileAt(dir, name));
  const std::string_view piece = contents;
  return WritePieces(std::move(fd), name, {&piece, 1});
}

absl::Status PublishFileAt(int dir, const std::string& name,
                           const std::vector<std::string_view>& pieces,
                           bool replace) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  if (absl::StartsWith(name, kTemporaryPrefix)) {
    return absl::InvalidArgumentError(
        absl::StrCat("names with ", kTemporaryPrefix, " are reserved"));
  }
  const std::string temporary = absl::StrCat(kTemporaryPrefix, name);
  ::unlinkat(dir, temporary.c_str(), 0);
  WEFT_ASSIGN_OR_RETURN(UniqueFd fd, CreateFileAt(dir, temporary));
  absl::Status status = WritePieces(std::move(fd), temporary, pieces);
  if (status.ok() && (Failpoint("files.rename") ||
                      ::renameat2(dir, temporary.c_str(), dir, name.c_str(),
                                  replace ? 0 : RENAME_NOREPLACE) != 0)) {
    status = ErrnoStatus(errno, "publishing " + name);
  }
  if (!status.ok()) {
    ::unlinkat(dir, temporary.c_str(), 0);
    return status;
  }
  return SyncDirectory(dir, "the folder of " + name);
}

absl::Status RemoveFileAt(int dir, const std::string& name) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  if (Failpoint("files.remove") || ::unlinkat(dir, name.c_str(), 0) != 0) {
    return ErrnoStatus(errno, "removing " + name);
  }
  return absl::OkStatus();
}

absl::Status SyncDirectory(int dir, const std::string& what) {
  if (Failpoint("files.sync_folder") || ::fsync(dir) != 0) {
    return ErrnoStatus(errno, "syncing " + what);
  }
  return absl::OkStatus();
}

}  // namespace weft
