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
#ifndef WEFT_SRC_ENGINE_RECOVERY_RECOVERY_H_
#define WEFT_SRC_ENGINE_RECOVERY_RECOVERY_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "src/engine/adapters/adapter_manager.h"
#include "src/engine/engine_context.h"
#include "src/engine/recovery/log_replay.h"
#include "src/engine/recovery/snapshotter.h"
#include "src/engine/train/batch_trainer.h"
#include "src/engine/train/step_executor.h"
#include "src/log/log_writer.h"
#include "src/log/record.h"
#include "src/log/state.h"

namespace weft::engine {

class Recovery {
 public:
  // The pointers outlive the object. `settings` are those of a SettingsRecord.
  // `resume` and `resume_moves` are those of LogReplay.
  Recovery(const EngineContext* context, AdapterManager* manager,
           BatchTrainer* trainer, StepExecutor* steps, Snapshotter* snapshots,
           std::string settings, LogReplay::Resume resume,
           LogReplay::ResumeMoves resume_moves)
      : context_(*context),
        snapshots_(*snapshots),
        settings_(std::move(settings)),
        replay_(context, manager, trainer, steps, snapshots, settings_,
                std::move(resume), std::move(resume_moves), &report_) {}

  // Reads the log to its end, starts to record, and begins the replay, which
  // goes on after Start has returned. After an error nothing is replayed.
  // `metrics` outlives the engine thread. Call it once, from another thread.
  absl::Status Start(log::LogMetrics* metrics);

  // Any thread may call the methods below.

  bool succeeded() const { return ended_.HasBeenNotified() && status_.ok(); }
  // Returns the status of the recovery; OK before it ends.
  absl::Status failure() const;

 private:
  // Restores adapters from the snapshot, and reads the log. Returns a reader of
  // the log from the snapshot on, and sets `*accepted` to the snapshot's steps.
  absl::StatusOr<std::unique_ptr<log::LogReader>> Read(
      std::vector<log::AcceptedRecord>* accepted);
  // Runs `work`, which reads the state, until the store answers. Nobody else
  // has work for the engine thread before a start has read the log.
  template <typename Work>
  auto Repeat(const Work& work) const;
  absl::Status StartRecording(log::LogMetrics* metrics);
  void Finish(absl::Status status);

  const EngineContext& context_;
  Snapshotter& snapshots_;
  const std::string settings_;
  absl::Time began_at_;
  RecoveryReport report_;
  LogReplay replay_;
  absl::Status status_;  // Set before ended_ is notified.
  absl::Notification ended_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_RECOVERY_RECOVERY_H_
