#include "src/log/folder/backup.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/file_io.h"
#include "src/base/status_macros.h"

namespace weft::log {
namespace {

namespace fs = std::filesystem;

constexpr int kTries = 5;
constexpr size_t kPieceBytes = size_t{4} << 20;
constexpr char kSnapshots[] = "SNAPSHOT-";

// Returns the names in a folder, sorted, without temporary files.
absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator it(path, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    std::string name = it->path().filename().string();
    if (!absl::StartsWith(name, kTemporaryPrefix)) {
      names.push_back(std::move(name));
    }
  }
  if (error) return ErrnoStatus(error.value(), absl::StrCat("listing ", path));
  std::ranges::sort(names);
  return names;
}

// Returns the name of the newest snapshot; empty if there is none.
absl::StatusOr<std::string> NewestSnapshot(const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(path));
  std::string newest;
  for (const std::string& name : names) {
    if (absl::StartsWith(name, kSnapshots)) newest = name;
  }
  return newest;
}

absl::Status Sync(const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd fd, OpenDirectory(path, path));
  return SyncDirectory(fd.get(), path);
}

// Returns whether a path leads into the folder, also through links.
bool IsWithin(const fs::path& path, const fs::path& folder) {
  std::error_code error;
  const fs::path inner = fs::weakly_canonical(fs::absolute(path), error);
  if (error) return false;  // Then making the copy fails.
  const fs::path outer = fs::canonical(folder, error);
  return !error && std::ranges::mismatch(outer, inner).in1 == outer.end();
}

class Copy {
 public:
  Copy(std::string from, std::string to)
      : from_(std::move(from)), to_(std::move(to)) {}

  // Copies once. Returns false if the server wrote a snapshot during the copy,
  // because the server may then have removed files that the copy needs.
  absl::StatusOr<bool> Run() {
    WEFT_ASSIGN_OR_RETURN(const std::string snapshot, NewestSnapshot(from_));
    WEFT_RETURN_IF_ERROR(MakeFolder(to_));
    WEFT_RETURN_IF_ERROR(File("FORMAT"));
    if (!snapshot.empty()) {
      const absl::Status status = File(snapshot);
      // The server removes a snapshot only after it has written a newer one.
      if (absl::IsNotFound(status)) return false;
      WEFT_RETURN_IF_ERROR(status);
    }
    // The log is copied first. So every image that a copied record names exists
    // when the images are copied.
    WEFT_RETURN_IF_ERROR(Folder("log"));
    WEFT_RETURN_IF_ERROR(Folder("images"));
    WEFT_RETURN_IF_ERROR(Sync(to_));
    WEFT_ASSIGN_OR_RETURN(const std::string now, NewestSnapshot(from_));
    return now == snapshot;
  }

  const BackupReport& report() const { return report_; }

 private:
  static absl::Status MakeFolder(const std::string& path) {
    if (::mkdir(path.c_str(), 0700) == 0) return absl::OkStatus();
    return ErrnoStatus(errno, absl::StrCat("making ", path));
  }

  absl::Status Folder(const std::string& folder) {
    WEFT_RETURN_IF_ERROR(MakeFolder(absl::StrCat(to_, "/", folder)));
    WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                          NamesIn(absl::StrCat(from_, "/", folder)));
    for (const std::string& name : names) {
      const absl::Status status = File(absl::StrCat(folder, "/", name));
      // Skips a file that the server has removed meanwhile. The server removes
      // a file that the copy needs only after it has written a snapshot. Then
      // BackUp copies again.
      if (!status.ok() && !absl::IsNotFound(status)) return status;
    }
    return Sync(absl::StrCat(to_, "/", folder));
  }

  // Copies only as many bytes as the file has now, because the server may
  // append to the log's last segment during the copy.
  absl::Status File(const std::string& name) {
    UniqueFd in;
    if (!Failpoint("journal.copy")) {
      in = UniqueFd(
          ::open(absl::StrCat(from_, "/", name).c_str(), O_RDONLY | O_CLOEXEC));
    }
    struct stat info {};
    if (in.get() < 0 || ::fstat(in.get(), &info) != 0) {
      return ErrnoStatus(errno, absl::StrCat("opening ", name));
    }
    const UniqueFd out(::open(absl::StrCat(to_, "/", name).c_str(),
                              O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (out.get() < 0) return ErrnoStatus(errno, absl::StrCat("making ", name));
    const auto size = static_cast<uint64_t>(info.st_size);
    std::string piece;
    for (uint64_t offset = 0; offset < size; offset += piece.size()) {
      piece.resize(std::min<uint64_t>(kPieceBytes, size - offset));
      WEFT_ASSIGN_OR_RETURN(const size_t read,
                            ReadAt(in.get(), offset, piece, name));
      if (read < piece.size()) {
        return absl::DataLossError(absl::StrCat(name, " became shorter"));
      }
      WEFT_RETURN_IF_ERROR(WriteAt(out.get(), offset, piece, name));
    }
    if (::fsync(out.get()) != 0) {
      return ErrnoStatus(errno, absl::StrCat("syncing ", name));
    }
    ++report_.files;
    report_.bytes += size;
    return absl::OkStatus();
  }

  const std::string from_;
  const std::string to_;
  BackupReport report_;
};

// Without a "/" at its end, so that what is appended stays beside the folder.
std::string WithoutSlash(const std::string& path) {
  return (fs::path(path) / "").parent_path().string();
}

}  // namespace

absl::Status MakeWholeFolder(
    const std::string& to,
    const std::function<absl::Status(const std::string& draft)>& fill) {
  const std::string path = WithoutSlash(to);
  std::error_code error;
  if (fs::exists(path, error)) {
    return absl::AlreadyExistsError(absl::StrCat(path, " exists"));
  }
  const std::string draft = absl::StrCat(path, ".partial");
  fs::remove_all(draft, error);
  const absl::Status filled = fill(draft);
  if (!filled.ok()) {
    fs::remove_all(draft, error);
    return filled;
  }
  fs::rename(draft, path, error);
  if (error) return ErrnoStatus(error.value(), absl::StrCat("making ", path));
  const std::string parent = fs::path(path).parent_path().string();
  return Sync(parent.empty() ? "." : parent);
}

absl::StatusOr<BackupReport> BackUp(const std::string& from,
                                    const std::string& to) {
  std::error_code error;
  if (!fs::exists(absl::StrCat(from, "/FORMAT"), error)) {
    return absl::NotFoundError(absl::StrCat(from, " is not a state folder"));
  }
  if (IsWithin(WithoutSlash(to), from)) {
    return absl::InvalidArgumentError(
        absl::StrCat(WithoutSlash(to), " is within ", from,
                     ": name a folder outside, as the copy's"));
  }
  BackupReport report;
  const auto fill = [&](const std::string& draft) -> absl::Status {
    for (int i = 0; i < kTries; ++i) {
      fs::remove_all(draft, error);
      Copy copy(from, draft);
      WEFT_ASSIGN_OR_RETURN(const bool whole, copy.Run());
      report = copy.report();
      if (whole) return absl::OkStatus();
    }
    return absl::UnavailableError(absl::StrCat(
        "the server wrote a snapshot during each of ", kTries,
        " tries to copy; raise --snapshot-log-bytes or copy when it does "
        "less"));
  };
  WEFT_RETURN_IF_ERROR(MakeWholeFolder(to, fill));
  return report;
}

}  // namespace weft::log
