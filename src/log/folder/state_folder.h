// Reads and writes the folder of --state-dir, which survives the process. One
// process at a time owns the folder, by a lock that ends with the process.
//
//   <dir>/LOCK, <dir>/FORMAT        version and base model
//   <dir>/SNAPSHOT-<sequence>       state after all records before <sequence>
//   <dir>/log/<sequence>.log        records from <sequence> on (log_format.h)
//   <dir>/images/<name>             blocks of floats (image_file.h)
//
// LOCK and the log's last segment are written in place. FORMAT, snapshots and
// images are written under a temporary name, synced and renamed, so each of
// them exists completely or not at all.
//
// Errors of all functions: those of file_io.h. Messages name the file, not its
// path.
// Threads: as state.h says.
#ifndef WEFT_SRC_LOG_FOLDER_STATE_FOLDER_H_
#define WEFT_SRC_LOG_FOLDER_STATE_FOLDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/files/file_io.h"
#include "src/log/state.h"

namespace weft::log {

class StateFolder : public State {
 public:
  // Creates the folder if it does not exist (its parent must exist), and
  // removes temporaries that a crash left. `model` is one line that identifies
  // the base model (base/fingerprint.h); a new folder stores it. With
  // `accept_change`, a folder of another model stores `model` from now on.
  // Errors: UNAVAILABLE (another process has the folder), FAILED_PRECONDITION
  // (another format version or model; the message says what differs),
  // DATA_LOSS (FORMAT is damaged or missing).
  static absl::StatusOr<std::unique_ptr<StateFolder>> Open(
      const std::string& path, const std::string& model,
      bool accept_change = false);
  // Returns the error about format version and base model with which Open would
  // end, if the folder is there. Takes no lock and writes nothing.
  static absl::Status Check(const std::string& path, const std::string& model,
                            bool accept_change);
  // Opens an existing folder of any base model to read it, also while another
  // process has it. Takes no lock and writes nothing. Errors: NOT_FOUND, and
  // those of Open.
  static absl::StatusOr<std::unique_ptr<StateFolder>> OpenToRead(
      const std::string& path);
  StateFolder(const StateFolder&) = delete;
  StateFolder& operator=(const StateFolder&) = delete;

  const std::string& model() const override { return model_; }
  absl::StatusOr<std::unique_ptr<LogReader>> OpenLog(
      uint64_t first_sequence) const override;
  absl::StatusOr<std::unique_ptr<LogSink>> ContinueLog(
      uint64_t next_sequence) override;
  absl::Status CheckRoom(uint64_t reserve) const override;
  absl::StatusOr<std::optional<SnapshotFile>> ReadSnapshot() const override;
  absl::Status WriteSnapshot(const SnapshotFile& snapshot) override;
  absl::Status Cut(uint64_t next_sequence,
                   const std::set<std::string>& keep_images) override;
  std::string NewImageName() override;
  absl::Status CreateImage(
      const std::string& name,
      const std::vector<std::string_view>& pieces) override;
  absl::StatusOr<std::unique_ptr<ImageReader>> OpenImage(
      const std::string& name) const override;
  absl::Status RemoveImage(const std::string& name) override;

  // Returns the first sequence of each segment, ascending.
  absl::StatusOr<std::vector<uint64_t>> Segments() const;
  // Returns `next_sequence` of each snapshot, ascending.
  absl::StatusOr<std::vector<uint64_t>> Snapshots() const;
  // Returns the file name of the segment that begins at `first_sequence`.
  static std::string SegmentName(uint64_t first_sequence);
  static std::string SnapshotName(uint64_t next_sequence);
  static constexpr char kFormat[] = "FORMAT";

  int directory() const { return root_.get(); }
  int log_directory() const { return log_.get(); }

 private:
  explicit StateFolder(std::string path) : path_(std::move(path)) {}

  absl::Status Lock();
  absl::Status OpenFolders();
  // Checks FORMAT, or writes it in a new folder.
  absl::Status CheckFormat(bool accept_change) const;
  absl::Status WriteFormat() const;
  absl::Status CutLog(uint64_t next_sequence) const;
  absl::Status CutImages(const std::set<std::string>& keep) const;

  const std::string path_;
  std::string model_;
  UniqueFd root_;
  UniqueFd lock_;
  UniqueFd log_;
  UniqueFd images_;
  std::atomic<uint64_t> num_images_ = 0;
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_FOLDER_STATE_FOLDER_H_
