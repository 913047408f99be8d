#include "src/base/files/spill_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "src/base/files/file_io.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

constexpr mode_t kOwnerOnly = 0700;

// Opens the folder and locks it. Returns an empty UniqueFd if the folder is
// locked already.
absl::StatusOr<UniqueFd> Lock(const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(UniqueFd dir, OpenDirectory(path, "the spill folder"));
  if (::flock(dir.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return UniqueFd();
    return ErrnoStatus(errno, "locking the spill folder");
  }
  // Another process may have removed the folder between the open and the lock.
  struct stat info {};
  if (::fstat(dir.get(), &info) != 0 || info.st_nlink == 0) {
    return absl::NotFoundError("the spill folder was removed");
  }
  return dir;
}

// Removes the numbered folders that no process has locked.
void RemoveAbandoned(const std::string& root) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(root, error), end;
       !error && it != end; it.increment(error)) {
    int number = 0;
    if (!absl::SimpleAtoi(it->path().filename().string(), &number)) continue;
    const absl::StatusOr<UniqueFd> lock = Lock(it->path());
    if (!lock.ok() || lock->get() < 0) continue;
    std::error_code failed;
    std::filesystem::remove_all(it->path(), failed);
    if (failed) {
      Log(LogLevel::kWarning, "an old spill folder stays",
          {{"reason", failed.message()}});
    }
  }
}

}  // namespace

absl::StatusOr<SpillFolder> SpillFolder::Open(const std::string& root) {
  if (::mkdir(root.c_str(), kOwnerOnly) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "making the spill folder");
  }
  struct stat info {};
  if (::lstat(root.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) ||
      info.st_uid != ::geteuid()) {
    return absl::FailedPreconditionError(absl::StrCat(
        root,
        " must be a folder of this process' user, and no link: remove it"));
  }
  RemoveAbandoned(root);
  for (int number = 0;; ++number) {
    std::string path = absl::StrCat(root, "/", number);
    if (::mkdir(path.c_str(), kOwnerOnly) != 0 && errno != EEXIST) {
      return ErrnoStatus(errno, "making the spill folder");
    }
    absl::StatusOr<UniqueFd> dir = Lock(path);
    if (absl::IsNotFound(dir.status())) continue;
    if (!dir.ok()) return dir.status();
    if (dir->get() >= 0) return SpillFolder(std::move(path), *std::move(dir));
  }
}

SpillFolder::~SpillFolder() {
  if (dir_.get() < 0) return;
  std::error_code error;
  std::filesystem::remove_all(path_, error);
  if (error) {
    Log(LogLevel::kWarning, "the spill folder stays",
        {{"reason", error.message()}});
  }
}

absl::Status SpillFolder::Write(
    const std::string& name,
    const std::vector<std::span<const float>>& blocks) const {
  UniqueFd fd(::openat(dir_.get(), name.c_str(),
                       O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                       0600));
  if (fd.get() < 0) return ErrnoStatus(errno, "creating " + name);
  absl::Status status;
  uint64_t offset = 0;
  for (const std::span<const float> block : blocks) {
    if (!status.ok()) break;
    const std::string_view bytes(reinterpret_cast<const char*>(block.data()),
                                 block.size_bytes());
    status = WriteAt(fd.get(), offset, bytes, name);
    offset += bytes.size();
  }
  // Some file systems report a full disk only at close.
  if (::close(fd.Release()) != 0 && status.ok()) {
    status = ErrnoStatus(errno, "closing " + name);
  }
  if (!status.ok()) ::unlinkat(dir_.get(), name.c_str(), 0);
  return status;
}

absl::Status SpillFolder::Read(
    const std::string& name,
    const std::vector<std::span<float>>& blocks) const {
  const UniqueFd fd(
      ::openat(dir_.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, "opening " + name);
  uint64_t offset = 0;
  for (const std::span<float> block : blocks) {
    const std::span<char> bytes(reinterpret_cast<char*>(block.data()),
                                block.size_bytes());
    WEFT_ASSIGN_OR_RETURN(const size_t size,
                          ReadAt(fd.get(), offset, bytes, name));
    if (size < bytes.size()) {
      return absl::DataLossError(absl::StrCat(name, " was cut short"));
    }
    offset += size;
  }
  return absl::OkStatus();
}

absl::Status SpillFolder::Remove(const std::string& name) const {
  if (::unlinkat(dir_.get(), name.c_str(), 0) != 0) {
    return ErrnoStatus(errno, "removing " + name);
  }
  return absl::OkStatus();
}

}  // namespace weft
