// Restores the state folder: first the adapters of the newest snapshot, then
// all later changes in the order of the log.
//
// Recovery runs on the engine thread as a chain of tasks, one record after
// another, so that adapters move to and from the device as usual. It first
// reads the log to its end (log_summary.h). From then on clients may use an
// adapter when the replay has passed its last record. So records and clients
// never change the same adapters.
//
// If the folder is damaged, the start fails and names the adapters that are hit
// (records/damage.h). Those that the operator gives up are left out, and their
// files are set aside. Then micro-batches that they shared run without them, so
// others' numbers may have other last bits.
//
// A step that runs again must end as it did, otherwise recovery fails. With the
// same build, processor and settings its results have the same bits, except
// from CUDA kernels that are not deterministic. A difference is logged as a
// warning and counted in RecoveryReport.
#ifndef WEFT_SRC_RECOVERY_RECOVERY_H_
#define WEFT_SRC_RECOVERY_RECOVERY_H_

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "src/adapters/adapter_manager.h"
#include "src/adapters/engine_context.h"
#include "src/journal/log_reader.h"
#include "src/records/damage.h"
#include "src/records/record.h"
#include "src/records/restore_points.h"
#include "src/recovery/log_replay.h"
#include "src/recovery/recovery_report.h"
#include "src/recovery/snapshotter.h"
#include "src/request/adapter_key.h"
#include "src/train/batch_trainer.h"
#include "src/train/step_executor.h"

namespace weft::engine {

class Recovery {
 public:
  // As for LogReplay.
  Recovery(const EngineContext* context, AdapterManager* manager,
           BatchTrainer* trainer, StepExecutor* steps, Snapshotter* snapshots,
           std::string settings)
      : context_(*context),
        snapshots_(*snapshots),
        replay_(context, manager, trainer, steps, snapshots,
                std::move(settings), &report_) {}

  // Runs when the log is read, on the engine thread. Gets the error of reading,
  // DATA_LOSS, which names the damage. If it returns an error, nothing is
  // replayed.
  using Opened = std::function<absl::Status(const absl::Status& read)>;
  // The same when the log is replayed. Its error fails the recovery.
  using Replayed = std::function<absl::Status()>;
  // Posts the first task.
  void Start(Opened opened, Replayed replayed);

  // The fields `log` and `damaged` do not change after Opened, the others until
  // the end.
  [[nodiscard]] const RecoveryReport& report() const { return report_; }

  // Any thread may call the methods below.

  [[nodiscard]] bool ended() const { return ended_.HasBeenNotified(); }
  [[nodiscard]] bool succeeded() const { return ended() && status_.ok(); }
  // Blocks until the end and returns the error.
  [[nodiscard]] absl::Status Wait() const;
  // Returns OK before the end.
  [[nodiscard]] absl::Status failure() const;

 private:
  // Reads everything and restores the adapters of the snapshot.
  [[nodiscard]] absl::Status Read();
  // Looks for damage, and sets aside the adapters that the operator gives up.
  [[nodiscard]] absl::Status CheckFolder();
  [[nodiscard]] absl::Status SetAside(const records::Damage& damage);
  [[nodiscard]] absl::Status RestoreSnapshot(const records::Snapshot& snapshot);
  void Replay();
  void Finish(absl::Status status);

  const EngineContext& context_;
  Snapshotter& snapshots_;
  Opened opened_;
  Replayed replayed_;
  RecoveryReport report_;
  LogReplay replay_;
  std::set<AdapterKey> skipped_;  // Adapters whose records are left out.
  // Adapters of durability checkpoint in the snapshot.
  records::RestorePoints restores_;
  std::optional<journal::LogReader> reader_;
  absl::Status status_;  // Set before ended_ is notified.
  absl::Notification ended_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_RECOVERY_RECOVERY_H_
