// Restores adapters from --state-dir: first those of the newest snapshot, then
// the later changes in the order of the log.
//
// Recovery runs on the engine thread as a chain of tasks, so that adapters can
// move to and from the device between two tasks. It first reads the log to its
// end (log_summary.h). If the log changes an adapter, clients may use the
// adapter only after its last record has been replayed. So the replay and
// clients never change the same adapter.
//
// Recovery fails with DATA_LOSS if the snapshot, a record or an image is
// damaged. Only a backup of the folder helps then.
//
// Recovery also fails if a step succeeded in the log but fails in the replay,
// or failed in the log but succeeds in the replay. With another build,
// processor or settings, or if CUDA kernels are not deterministic, the bits of
// a result may differ from the log. If the result of an optimizer step differs,
// recovery logs a warning, and RecoveryReport counts the step.
#ifndef WEFT_SRC_ENGINE_RECOVERY_H_
#define WEFT_SRC_ENGINE_RECOVERY_H_

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "src/engine/adapter_manager.h"
#include "src/engine/batch_trainer.h"
#include "src/engine/engine_context.h"
#include "src/engine/log_replay.h"
#include "src/engine/snapshotter.h"
#include "src/engine/step_executor.h"
#include "src/log/log_reader.h"
#include "src/log/record.h"
#include "src/request/adapter_key.h"

namespace weft::engine {

class Recovery {
 public:
  // The arguments are those of LogReplay's constructor.
  Recovery(const EngineContext* context, AdapterManager* manager,
           BatchTrainer* trainer, StepExecutor* steps, Snapshotter* snapshots,
           std::string settings)
      : context_(*context),
        snapshots_(*snapshots),
        replay_(context, manager, trainer, steps, snapshots,
                std::move(settings), &report_) {}

  // Runs on the engine thread when the log has been read to its end, or when an
  // error has ended the reading. `read` is the outcome. If the function returns
  // an error, nothing is replayed.
  using Opened = std::function<absl::Status(const absl::Status& read)>;
  // Runs on the engine thread when the log has been replayed without an error.
  using Replayed = std::function<void()>;
  // Posts the first task of the recovery to the engine thread.
  void Start(Opened opened, Replayed replayed);

  // RecoveryReport::log is final when Opened runs without an error. The other
  // fields are final when the recovery ends.
  [[nodiscard]] const RecoveryReport& report() const { return report_; }
  // Moves the log's notes out of the report, so that the report does not keep
  // those that are erased later.
  [[nodiscard]] Notes TakeNotes() { return std::move(report_.log.notes); }

  // Any thread may call the methods below.

  [[nodiscard]] bool succeeded() const {
    return ended_.HasBeenNotified() && status_.ok();
  }
  // Returns the status of the recovery; OK before it ends.
  [[nodiscard]] absl::Status failure() const;

 private:
  // Reads the snapshot and the log. Restores adapters from the snapshot.
  [[nodiscard]] absl::Status Read();
  [[nodiscard]] absl::Status RestoreSnapshot(const records::Snapshot& snapshot);
  void Replay();
  void Finish(absl::Status status);

  const EngineContext& context_;
  Snapshotter& snapshots_;
  Opened opened_;
  Replayed replayed_;
  RecoveryReport report_;
  LogReplay replay_;
  std::optional<journal::LogReader> reader_;
  absl::Status status_;  // Set before ended_ is notified.
  absl::Notification ended_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_RECOVERY_H_
