// The folder of --state-dir: what survives the process. It belongs to one
// process at a time, by a lock that ends with it.
//
//   <dir>/LOCK, <dir>/FORMAT        version and base model
//   <dir>/SNAPSHOT-<sequence>       what the log held before <sequence>
//   <dir>/log/<sequence>.log        records from <sequence> on (log_format.h)
//   <dir>/images/<name>             blocks of floats (image_file.h)
//
// Every file but LOCK and the log's last segment is written under another name,
// synced and renamed: it is there completely or not at all.
//
// Errors of all functions: those of file_io.h. They name the file, not the path
// to it.
// Threads: ReadSnapshot, WriteSnapshot and Cut are for one thread at a time;
// what else is const may be used from any. All functions block on the disk.
#ifndef WEFT_SRC_JOURNAL_STATE_FOLDER_H_
#define WEFT_SRC_JOURNAL_STATE_FOLDER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/files/file_io.h"

namespace weft::journal {

struct Snapshot {
  // The first record of the log that the snapshot does not contain.
  uint64_t next_sequence = 0;
  std::string bytes;
};

class StateFolder {
 public:
  // Makes the folder when it is missing (its parent exists) and removes the
  // temporaries that a crash left. `model`: one line that identifies the base
  // model; a new folder stores it.
  // UNAVAILABLE: another process has the folder. FAILED_PRECONDITION names both
  // format versions or both models when they differ.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<StateFolder>> Open(
      const std::string& path, const std::string& model);
  StateFolder(const StateFolder&) = delete;
  StateFolder& operator=(const StateFolder&) = delete;

  // The newest one; none in a new folder. DATA_LOSS when it is damaged.
  [[nodiscard]] absl::StatusOr<std::optional<Snapshot>> ReadSnapshot() const;

  // Durable, and the newest from now on; Cut may follow. FAILED_PRECONDITION
  // when a snapshot is there that contains more records.
  [[nodiscard]] absl::Status WriteSnapshot(const Snapshot& snapshot);

  // Removes segments that hold only records before `next_sequence`, all
  // snapshots but the newest, and images that `keep_images` lacks: no other
  // image may be written meanwhile. A crash leaves some of them.
  // FAILED_PRECONDITION when the newest snapshot does not contain all records
  // before `next_sequence`.
  [[nodiscard]] absl::Status Cut(uint64_t next_sequence,
                                 const std::set<std::string>& keep_images);

  // Free room in bytes for a process that is not root's.
  [[nodiscard]] absl::StatusOr<uint64_t> FreeBytes() const;

  // First sequences of the log's segments, ascending.
  [[nodiscard]] absl::StatusOr<std::vector<uint64_t>> Segments() const;
  // `next_sequence` of the snapshots, ascending.
  [[nodiscard]] absl::StatusOr<std::vector<uint64_t>> Snapshots() const;
  // The file of the segment that begins at `first_sequence`.
  [[nodiscard]] static std::string SegmentName(uint64_t first_sequence);

  [[nodiscard]] int directory() const { return root_.get(); }
  [[nodiscard]] int log_directory() const { return log_.get(); }
  [[nodiscard]] int images_directory() const { return images_.get(); }

 private:
  explicit StateFolder(std::string path) : path_(std::move(path)) {}

  [[nodiscard]] static std::string SnapshotName(uint64_t next_sequence);

  [[nodiscard]] absl::Status Lock();
  [[nodiscard]] absl::Status OpenFolders();
  [[nodiscard]] absl::Status CheckFormat(const std::string& model) const;
  [[nodiscard]] absl::Status CutLog(uint64_t next_sequence) const;
  [[nodiscard]] absl::Status CutImages(const std::set<std::string>& keep) const;

  const std::string path_;
  UniqueFd root_;
  UniqueFd lock_;
  UniqueFd log_;
  UniqueFd images_;
};

}  // namespace weft::journal

#endif  // WEFT_SRC_JOURNAL_STATE_FOLDER_H_
