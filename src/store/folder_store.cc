#include "src/store/folder_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/files/failpoint.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"

namespace weft::store {
namespace {

namespace fs = std::filesystem;

constexpr char kOwnFolder[] = ".weft";  // The lock and temporary files.
constexpr absl::Duration kLockLimit = absl::Seconds(10);

std::string Hex(const std::string& bytes) {
  return absl::BytesToHexString(bytes);
}

std::string RandomName() {
  std::random_device random;
  return absl::StrCat("tmp-", absl::Hex(random(), absl::kZeroPad8),
                      absl::Hex(random(), absl::kZeroPad8));
}

absl::Status SyncFolder(const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd fd, OpenDirectory(path, "a folder"));
  return SyncDirectory(fd.get(), "a folder");
}

// Creates the folders from `root` down to `path` that are missing, durably.
absl::Status MakeFolders(const std::string& root, const fs::path& path) {
  if (path == root || fs::is_directory(path)) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(MakeFolders(root, path.parent_path()));
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "creating a folder");
  }
  return SyncFolder(path.parent_path().string());
}

absl::StatusOr<std::string> EtagOf(int fd) {
  Sha256Sum sum;
  std::vector<char> block(1 << 16);
  for (uint64_t offset = 0;;) {
    WEFT_ASSIGN_OR_RETURN(const size_t size,
                          ReadAt(fd, offset, block, "an object"));
    if (size == 0) return Hex(sum.Finish());
    sum.Add({block.data(), size});
    offset += size;
  }
}

// A file that exists until it is closed or its process ends: the next Open
// removes those that no process has locked.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& folder)
      : path_(folder + "/" + RandomName()) {}
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { ::unlink(path_.c_str()); }

  // Writes and syncs the file. Returns its ETag.
  absl::StatusOr<std::string> Write(
      const std::vector<std::string_view>& pieces) {
    fd_ = UniqueFd(
        ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    struct stat info {};
    // An Open that came between may have removed it.
    if (fd_.get() < 0 || ::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0 ||
        ::fstat(fd_.get(), &info) != 0 || info.st_nlink == 0) {
      return absl::UnavailableError("a temporary file was not created");
    }
    Sha256Sum sum;
    uint64_t offset = 0;
    for (const std::string_view piece : pieces) {
      WEFT_RETURN_IF_ERROR(WriteAt(fd_.get(), offset, piece, "an object"));
      sum.Add(piece);
      offset += piece.size();
    }
    if (Failpoint("files.sync") || ::fsync(fd_.get()) != 0) {
      return ErrnoStatus(errno, "syncing an object");
    }
    return Hex(sum.Finish());
  }

  const char* path() const { return path_.c_str(); }

 private:
  const std::string path_;
  UniqueFd fd_;
};

void RemoveTemporaries(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (!absl::StartsWith(entry.path().filename().string(), "tmp-")) continue;
    const UniqueFd fd(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    if (fd.get() >= 0 && ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) {
      ::unlink(entry.path().c_str());
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<FolderStore>> FolderStore::Open(
    std::string path) {
  const std::string own = absl::StrCat(path, "/", kOwnFolder);
  WEFT_RETURN_IF_ERROR(MakeFolders("/", own));
  RemoveTemporaries(own);
  return std::unique_ptr<FolderStore>(new FolderStore(std::move(path)));
}

absl::Status FolderStore::Check(const std::string& key) const {
  if (stopping_) return absl::CancelledError(NameOf(key) + ": stopped");
  WEFT_RETURN_IF_ERROR(CheckKey(key));
  if (absl::StartsWith(key, kOwnFolder) ||
      absl::StrContains(key, absl::StrCat("/", kOwnFolder))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the key \"", key, "\" has a part that begins with ", kOwnFolder));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> FolderStore::OpenObject(const std::string& key) const {
  UniqueFd fd(::open(PathOf(key).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (fd.get() < 0) return ErrnoStatus(errno, "opening " + NameOf(key));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::NotFoundError(NameOf(key) + ": no such object");
  }
  return fd;
}

absl::StatusOr<UniqueFd> FolderStore::Lock() const {
  UniqueFd fd(::open(absl::StrCat(path_, "/", kOwnFolder, "/lock").c_str(),
                     O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (fd.get() < 0) return ErrnoStatus(errno, "opening the lock");
  const absl::Time end = SteadyNow() + kLockLimit;
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return ErrnoStatus(errno, "locking the store");
    }
    if (stopping_) return absl::CancelledError("stopped");
    if (SteadyNow() >= end) {
      return absl::UnavailableError(path_ + " is locked by another process");
    }
    absl::SleepFor(absl::Milliseconds(2));
  }
  return fd;
}

absl::StatusOr<std::string> FolderStore::Create(
    const std::string& key, const std::vector<std::string_view>& pieces) {
  WEFT_RETURN_IF_ERROR(Check(key));
  const fs::path path = PathOf(key);
  WEFT_RETURN_IF_ERROR(MakeFolders(path_, path.parent_path()));
  TemporaryFile file(absl::StrCat(path_, "/", kOwnFolder));
  WEFT_ASSIGN_OR_RETURN(const std::string etag, file.Write(pieces));
  if (Failpoint("files.rename") || ::link(file.path(), path.c_str()) != 0) {
    return ErrnoStatus(errno, "creating " + NameOf(key));
  }
  WEFT_RETURN_IF_ERROR(SyncFolder(path.parent_path().string()));
  return etag;
}

absl::StatusOr<std::string> FolderStore::Swap(const std::string& key,
                                              std::string_view bytes,
                                              const std::string& etag) {
  WEFT_RETURN_IF_ERROR(Check(key));
  TemporaryFile file(absl::StrCat(path_, "/", kOwnFolder));
  WEFT_ASSIGN_OR_RETURN(const std::string next, file.Write({bytes}));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd lock, Lock());
  WEFT_ASSIGN_OR_RETURN(const bool has_it, HasEtag(key, etag));
  if (!has_it) return OtherEtag(NameOf(key), etag);
  const fs::path path = PathOf(key);
  if (Failpoint("files.rename") || ::rename(file.path(), path.c_str()) != 0) {
    return ErrnoStatus(errno, "replacing " + NameOf(key));
  }
  WEFT_RETURN_IF_ERROR(SyncFolder(path.parent_path().string()));
  return next;
}

absl::StatusOr<Object> FolderStore::Get(const std::string& key,
                                        uint64_t max_bytes) {
  WEFT_RETURN_IF_ERROR(Check(key));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd fd, OpenObject(key));
  WEFT_ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get(), NameOf(key)));
  if (size > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(NameOf(key), ": ", size, " bytes > ", max_bytes));
  }
  Object object;
  object.bytes.resize(size);
  WEFT_ASSIGN_OR_RETURN(const size_t read,
                        ReadAt(fd.get(), 0, object.bytes, NameOf(key)));
  object.bytes.resize(read);
  object.etag = Hex(Sha256(object.bytes));
  return object;
}

absl::StatusOr<size_t> FolderStore::GetRange(const std::string& key,
                                             uint64_t offset,
                                             std::span<char> bytes,
                                             uint64_t* size) {
  WEFT_RETURN_IF_ERROR(Check(key));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd fd, OpenObject(key));
  WEFT_ASSIGN_OR_RETURN(*size, FileSize(fd.get(), NameOf(key)));
  return ReadAt(fd.get(), offset, bytes, NameOf(key));
}

absl::StatusOr<std::vector<ListedObject>> FolderStore::List(
    const std::string& prefix, const std::string& after, size_t max_objects) {
  if (stopping_) return absl::CancelledError(NameOf(prefix) + ": stopped");
  // The folder of the prefix, with its '/': "logs/0/" of "logs/0/rec".
  const std::string parent = prefix.substr(0, prefix.rfind('/') + 1);
  std::vector<std::string> keys;
  std::error_code error;
  for (auto entry = fs::recursive_directory_iterator(PathOf(parent), error);
       !error && entry != fs::recursive_directory_iterator();
       entry.increment(error)) {
    if (absl::StartsWith(entry->path().filename().string(), kOwnFolder)) {
      entry.disable_recursion_pending();
      continue;
    }
    std::string key = entry->path().string().substr(path_.size() + 1);
    if (entry->is_regular_file() && absl::StartsWith(key, prefix) &&
        key > after) {
      keys.push_back(std::move(key));
    }
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return ErrnoStatus(error.value(), "listing " + NameOf(prefix));
  }
  std::sort(keys.begin(), keys.end());
  std::vector<ListedObject> found;
  for (std::string& key : keys) {
    if (found.size() == max_objects) break;
    const absl::StatusOr<UniqueFd> fd = OpenObject(key);
    if (absl::IsNotFound(fd.status())) continue;  // It was deleted meanwhile.
    if (!fd.ok()) return fd.status();
    WEFT_ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd->get(), key));
    WEFT_ASSIGN_OR_RETURN(std::string etag, EtagOf(fd->get()));
    found.push_back(
        {.key = std::move(key), .etag = std::move(etag), .size = size});
  }
  return found;
}

absl::Status FolderStore::Delete(const std::string& key) {
  WEFT_RETURN_IF_ERROR(Check(key));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd lock, Lock());
  return Remove(key);
}

absl::Status FolderStore::DeleteIf(const std::string& key,
                                   const std::string& etag) {
  WEFT_RETURN_IF_ERROR(Check(key));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd lock, Lock());
  WEFT_ASSIGN_OR_RETURN(const bool has_it, HasEtag(key, etag));
  if (has_it) return Remove(key);
  const absl::Status there = OpenObject(key).status();
  if (absl::IsNotFound(there)) return absl::OkStatus();
  return there.ok() ? OtherEtag(NameOf(key), etag) : there;
}

absl::StatusOr<bool> FolderStore::HasEtag(const std::string& key,
                                          const std::string& etag) const {
  const absl::StatusOr<UniqueFd> now = OpenObject(key);
  if (absl::IsNotFound(now.status())) return false;
  WEFT_RETURN_IF_ERROR(now.status());
  WEFT_ASSIGN_OR_RETURN(const std::string found, EtagOf(now->get()));
  return found == etag;
}

absl::Status FolderStore::Remove(const std::string& key) const {
  const fs::path path = PathOf(key);
  if (Failpoint("files.remove") || ::unlink(path.c_str()) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return absl::OkStatus();
    return ErrnoStatus(errno, "removing " + NameOf(key));
  }
  return SyncFolder(path.parent_path().string());
}

}  // namespace weft::store
