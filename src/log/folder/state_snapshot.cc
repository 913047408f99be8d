// Reads and writes snapshots, and removes the files that a snapshot replaces.
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/files/disk_room.h"
#include "src/base/status_macros.h"
#include "src/log/folder/state_folder.h"
#include "src/log/state_format.h"

namespace weft::log {
absl::StatusOr<std::optional<SnapshotFile>> StateFolder::ReadSnapshot() const {
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> snapshots, Snapshots());
  if (snapshots.empty()) return std::nullopt;
  const std::string name = SnapshotName(snapshots.back());
  WEFT_ASSIGN_OR_RETURN(std::string file, ReadFileAt(root_.get(), name));
  return DecodeSnapshotFile(snapshots.back(), std::move(file), name);
}

absl::Status StateFolder::WriteSnapshot(const SnapshotFile& snapshot) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> snapshots, Snapshots());
  if (!snapshots.empty() && snapshots.back() > snapshot.next_sequence) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a snapshot of the records before ", snapshots.back(),
        " exists; one of those before ", snapshot.next_sequence, " is older"));
  }
  const std::string header =
      SnapshotHeader(snapshot.next_sequence, snapshot.bytes);
  return PublishFileAt(root_.get(), SnapshotName(snapshot.next_sequence),
                       {header, snapshot.bytes}, true);
}

absl::Status StateFolder::Cut(uint64_t next_sequence,
                              const std::set<std::string>& keep_images) {
  WEFT_ASSIGN_OR_RETURN(std::vector<uint64_t> snapshots, Snapshots());
  if (snapshots.empty() || snapshots.back() < next_sequence) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no snapshot contains all records before ", next_sequence));
  }
  snapshots.pop_back();
  for (const uint64_t older : snapshots) {
    WEFT_RETURN_IF_ERROR(RemoveFileAt(root_.get(), SnapshotName(older)));
  }
  WEFT_RETURN_IF_ERROR(CutLog(next_sequence));
  return CutImages(keep_images);
}

absl::Status StateFolder::CutLog(uint64_t next_sequence) const {
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> segments, Segments());
  // A segment ends where the next one starts. The last segment stays, because
  // the writer still appends to it.
  for (size_t i = 0; i + 1 < segments.size(); ++i) {
    if (segments[i + 1] > next_sequence) break;
    WEFT_RETURN_IF_ERROR(RemoveFileAt(log_.get(), SegmentName(segments[i])));
  }
  return absl::OkStatus();
}

absl::Status StateFolder::CutImages(const std::set<std::string>& keep) const {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator it(path_ + "/images", error);
  for (; !error && it != std::filesystem::directory_iterator();
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!keep.contains(name)) names.push_back(name);
  }
  if (error) return ErrnoStatus(error.value(), "listing the images");
  for (const std::string& name : names) {
    WEFT_RETURN_IF_ERROR(RemoveFileAt(images_.get(), name));
  }
  return absl::OkStatus();
}

absl::Status StateFolder::CheckRoom(uint64_t reserve) const {
  return CheckDiskRoom(path_, "the state folder", 0, reserve);
}

}  // namespace weft::log
