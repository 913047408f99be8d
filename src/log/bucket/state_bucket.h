// Keeps the state of a server in an object store, where it survives machines.
//
//   FORMAT                      version and base model
//   owners/<log>, logs/<log>    each log of the state (log_keys.h)
//
// A process has at most one of the logs. The names of groups, snapshots and
// images begin with their writer's epoch. A snapshot counts when the manifest
// names it. An owner removes nothing of a later one.
#ifndef WEFT_SRC_LOG_BUCKET_STATE_BUCKET_H_
#define WEFT_SRC_LOG_BUCKET_STATE_BUCKET_H_

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
#include "absl/time/time.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/object_log.h"
#include "src/log/bucket/standby.h"
#include "src/log/state.h"
#include "src/store/object_store.h"

namespace weft::log {

// Threads: as state.h says; one at a time may call SelectLog and TryTake,
// before other threads have the state.
class StateBucket : public State {
 public:
  // Checks FORMAT, or writes it below a prefix that has no objects. `model` and
  // `accept_change` are those of StateFolder::Open; without a model, only reads
  // a state that exists. Errors: FAILED_PRECONDITION (another format version or
  // model, or foreign objects), NOT_FOUND (without a model: no state),
  // DATA_LOSS (FORMAT is damaged or missing), and those of object_store.h.
  static absl::StatusOr<std::unique_ptr<StateBucket>> Open(
      std::unique_ptr<store::ObjectStore> store,
      const std::optional<std::string>& model, bool accept_change);
  // Begins a state below a prefix that has no objects, and takes its log 0.
  // Open refuses what is there until Finish. Errors: FAILED_PRECONDITION (there
  // are objects), ABORTED (another process begins, too), and those of
  // object_store.h.
  static absl::StatusOr<std::unique_ptr<StateBucket>> Begin(
      std::unique_ptr<store::ObjectStore> store, std::string model,
      const Instance& self);
  // Releases the log, and makes what is there a state. REQUIRES: Begin.
  absl::Status Finish();

  // Returns the logs that processes have had, in order. A state that nobody has
  // had has log 0.
  absl::StatusOr<std::vector<int>> ListLogs() const;
  // Errors: FAILED_PRECONDITION if --logs=`num_logs` leaves out logs that
  // exist and are not drained.
  absl::Status CheckLogs(int num_logs) const;
  // From now on reads a log that exists, by default the only one. For a process
  // that takes none. Errors: NOT_FOUND, FAILED_PRECONDITION (there are
  // several).
  absl::Status SelectLog(std::optional<int> log);

  // Takes one of the logs, if one is free for `self`. Log n has the n-th watch,
  // and a log that is lost to another process is no error. Leaves a damaged log
  // alone, and says so in the log, as long as there are others. Returns whether
  // it has taken one. Errors: UNAVAILABLE, and others that repeating does not
  // mend: DATA_LOSS if all logs are damaged, and those of object_store.h.
  absl::StatusOr<bool> TryTake(const Instance& self,
                               std::vector<LogWatch>* watches);
  // Returns the manifest of an owner that lives, as TryTake has seen last. Its
  // epoch is 0 if there is none. Processes with other names get other owners.
  const Manifest& seen() const { return seen_; }
  store::ObjectStore* objects() const { return store_.get(); }
  // Null before TryTake has returned true.
  LogOwner* owner() const { return owner_.get(); }

  // Beats from now on. REQUIRES: owner() is not null.
  void StartBeats(OwnerMetrics* metrics);

  const std::string& model() const override { return model_; }
  absl::Status failure() const override;
  bool answers() const override;
  absl::Status Release(bool drained) override;
  absl::StatusOr<std::unique_ptr<LogReader>> OpenLog(
      uint64_t first_sequence) const override;
  absl::StatusOr<std::unique_ptr<LogSink>> ContinueLog(
      uint64_t next_sequence) override;
  absl::Duration ReadTime() const override;
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
  absl::Status CopyImage(int log, const std::string& from,
                         const std::string& name) override;
  absl::Status RemoveImage(const std::string& name) override;

 private:
  explicit StateBucket(std::unique_ptr<store::ObjectStore> store)
      : store_(std::move(store)) {}

  // Takes a log that was free as `seen`. Returns false if another process was
  // faster. Errors: DATA_LOSS, and those of object_store.h.
  absl::StatusOr<bool> Take(const Instance& self, const LogKeys& keys,
                            const SeenManifest& seen);
  absl::Status CheckFormat(const std::optional<std::string>& model,
                           bool accept_change);
  absl::StatusOr<SnapshotPlace> Newest() const;
  // Returns UNAVAILABLE unless answers(). Otherwise each of many images would
  // hold its reader or writer until the time for one request is over.
  absl::Status CheckAnswers() const;
  // Removes the objects below `prefix` that `removes` chooses.
  template <typename Removes>
  absl::Status RemoveIf(const std::string& prefix, const Removes& removes);

  const std::unique_ptr<store::ObjectStore> store_;
  std::string model_;
  LogKeys keys_;  // Of the log that this process has, or reads.
  Manifest seen_;
  std::unique_ptr<LogOwner> owner_;
  // What Take has read, for the first ReadSnapshot.
  mutable std::optional<SnapshotFile> snapshot_;
  SegmentPlaces places_;
  std::unique_ptr<HeartbeatThread> beats_;  // Ends before the owner.
  std::atomic<uint64_t> num_images_ = 0;
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_STATE_BUCKET_H_
