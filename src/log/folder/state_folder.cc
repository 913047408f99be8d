#include "src/log/folder/state_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/files/durable_folder.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/operator_file.h"
#include "src/base/status_macros.h"
#include "src/log/state_format.h"

namespace weft::log {
namespace {

constexpr char kLock[] = "LOCK";
constexpr char kLogFolder[] = "log";
constexpr char kImagesFolder[] = "images";
constexpr char kSegmentSuffix[] = ".log";
constexpr char kSnapshotPrefix[] = "SNAPSHOT-";
constexpr int kDigits = 20;  // The number of digits of 2^64.
constexpr mode_t kOwnerOnly = 0700;

absl::Status MakeFolder(int parent, const std::string& name,
                        const std::string& what) {
  if (Failpoint("journal.make_folder") ||
      (::mkdirat(parent, name.c_str(), kOwnerOnly) != 0 && errno != EEXIST)) {
    return ErrnoStatus(errno, "making " + what);
  }
  return absl::OkStatus();
}

// Finds the file names that consist of prefix, number and suffix. Returns the
// numbers in ascending order.
absl::StatusOr<std::vector<uint64_t>> ListNumbers(const std::string& path,
                                                  const std::string& what,
                                                  const std::string& prefix,
                                                  const std::string& suffix) {
  std::vector<uint64_t> numbers;
  std::error_code error;
  std::filesystem::directory_iterator it(path, error);
  for (; !error && it != std::filesystem::directory_iterator();
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    uint64_t number = 0;
    if (name.size() == prefix.size() + kDigits + suffix.size() &&
        absl::StartsWith(name, prefix) && absl::EndsWith(name, suffix) &&
        absl::SimpleAtoi(name.substr(prefix.size(), kDigits), &number)) {
      numbers.push_back(number);
    }
  }
  if (error) return ErrnoStatus(error.value(), "listing " + what);
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

}  // namespace

std::string StateFolder::SegmentName(uint64_t first_sequence) {
  return absl::StrFormat("%0*d%s", kDigits, first_sequence, kSegmentSuffix);
}

std::string StateFolder::SnapshotName(uint64_t next_sequence) {
  return absl::StrFormat("%s%0*d", kSnapshotPrefix, kDigits, next_sequence);
}

absl::StatusOr<std::vector<uint64_t>> StateFolder::Segments() const {
  return ListNumbers(path_ + "/" + kLogFolder, "the log", "", kSegmentSuffix);
}

absl::StatusOr<std::vector<uint64_t>> StateFolder::Snapshots() const {
  return ListNumbers(path_, "the state folder", kSnapshotPrefix, "");
}

absl::StatusOr<std::unique_ptr<StateFolder>> StateFolder::Open(
    const std::string& path, const std::string& model, bool accept_change) {
  WEFT_RETURN_IF_ERROR(MakeFolder(AT_FDCWD, path, "the state folder"));
  std::unique_ptr<StateFolder> folder(new StateFolder(path));
  folder->model_ = model;
  WEFT_ASSIGN_OR_RETURN(folder->root_, OpenDirectory(path, "the state folder"));
  WarnIfOthersMayWrite(path);
  WEFT_RETURN_IF_ERROR(folder->Lock());
  for (const char* part : {kLogFolder, kImagesFolder}) {
    WEFT_RETURN_IF_ERROR(MakeFolder(folder->root_.get(), part, part));
  }
  WEFT_RETURN_IF_ERROR(folder->OpenFolders());
  WEFT_RETURN_IF_ERROR(folder->CheckFormat(accept_change));
  for (const std::string part : {"", "/log", "/images"}) {
    WEFT_RETURN_IF_ERROR(RemoveStaleTemporaries(path + part));
  }
  // A killed process may have renamed a snapshot without syncing the directory.
  // From now on the snapshot is in use, so the directory is synced.
  WEFT_RETURN_IF_ERROR(SyncDirectory(folder->directory(), "the state folder"));
  return folder;
}

absl::Status StateFolder::Check(const std::string& path,
                                const std::string& model, bool accept_change) {
  const absl::StatusOr<UniqueFd> root = OpenDirectory(path, "the state folder");
  if (absl::IsNotFound(root.status())) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(root.status());
  const absl::StatusOr<std::string> text = ReadFileAt(root->get(), kFormat);
  if (absl::IsNotFound(text.status())) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(text.status());
  WEFT_ASSIGN_OR_RETURN(const std::string stored, DecodeFormat(*text));
  return stored == model || accept_change ? absl::OkStatus()
                                          : OtherModel(stored, model);
}

absl::StatusOr<std::unique_ptr<StateFolder>> StateFolder::OpenToRead(
    const std::string& path) {
  std::unique_ptr<StateFolder> folder(new StateFolder(path));
  WEFT_ASSIGN_OR_RETURN(folder->root_, OpenDirectory(path, "the state folder"));
  WEFT_ASSIGN_OR_RETURN(const std::string text,
                        ReadFileAt(folder->root_.get(), kFormat));
  WEFT_ASSIGN_OR_RETURN(folder->model_, DecodeFormat(text));
  WEFT_RETURN_IF_ERROR(folder->OpenFolders());
  return folder;
}

absl::Status StateFolder::Lock() {
  if (!Failpoint("journal.lock")) {
    lock_ = UniqueFd(::openat(root_.get(), kLock,
                              O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  }
  if (lock_.get() < 0) return ErrnoStatus(errno, "opening LOCK");
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "locking LOCK");
  return absl::UnavailableError(
      "another process has the state folder; it is for one at a time");
}

absl::Status StateFolder::OpenFolders() {
  WEFT_ASSIGN_OR_RETURN(log_, OpenDirectoryAt(root_.get(), kLogFolder));
  WEFT_ASSIGN_OR_RETURN(images_, OpenDirectoryAt(root_.get(), kImagesFolder));
  return absl::OkStatus();
}

absl::Status StateFolder::CheckFormat(bool accept_change) const {
  const absl::StatusOr<std::string> text = ReadFileAt(root_.get(), kFormat);
  if (text.ok()) {
    WEFT_ASSIGN_OR_RETURN(const std::string stored, DecodeFormat(*text));
    if (stored == model_) return absl::OkStatus();
    return accept_change ? WriteFormat() : OtherModel(stored, model_);
  }
  if (!absl::IsNotFound(text.status())) return text.status();
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> segments, Segments());
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> snapshots, Snapshots());
  if (!segments.empty() || !snapshots.empty()) {
    return absl::DataLossError("FORMAT of the state folder is missing");
  }
  // The folder is new, because FORMAT is written before any record. Its parent
  // is synced before FORMAT is written, so that the folder itself survives a
  // crash.
  constexpr char kParent[] = "the parent of the state folder";
  WEFT_ASSIGN_OR_RETURN(const UniqueFd parent,
                        OpenDirectory(path_ + "/..", kParent));
  WEFT_RETURN_IF_ERROR(SyncDirectory(parent.get(), kParent));
  return WriteFormat();
}

absl::Status StateFolder::WriteFormat() const {
  return PublishFileAt(root_.get(), kFormat, {EncodeFormat(model_)},
                       /*replace=*/true);
}

}  // namespace weft::log
