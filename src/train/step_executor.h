// Runs the steps that run alone on the device: optimizer steps, saving and
// loading a checkpoint, publishing a snapshot.
#ifndef WEFT_SRC_TRAIN_STEP_EXECUTOR_H_
#define WEFT_SRC_TRAIN_STEP_EXECUTOR_H_

#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "src/adapters/adapter_io.h"
#include "src/adapters/engine_context.h"
#include "src/dispatch/work.h"

namespace weft::engine {

// Threads: engine thread. The I/O thread reads and writes the files.
class StepExecutor {
 public:
  // `context` outlives the executor.
  explicit StepExecutor(const EngineContext* context) : context_(*context) {}

  // Runs the step and completes it, at once or when its files are written or
  // read. Until then no other work of the adapter runs.
  void Run(const dispatch::StepTask& step);
  // Runs an optimizer step or the publishing of a snapshot and completes it.
  // Returns its result, which may be a StepFailure.
  absl::StatusOr<StepResult> RunNow(const dispatch::StepTask& step);

 private:
  [[nodiscard]] absl::StatusOr<StepResult> Optim(
      const dispatch::StepTask& step, const OptimStepRequest& request);
  void Save(const dispatch::StepTask& step,
            const SaveCheckpointRequest& request);
  void Load(const dispatch::StepTask& step,
            const LoadCheckpointRequest& request);
  // Loads a checkpoint that was read into the step's adapter, which may no
  // longer exist. `image` is the log's copy of the checkpoint. Completes the
  // step unless it returns an error.
  [[nodiscard]] absl::Status Install(const dispatch::StepTask& step,
                                     const LoadCheckpointRequest& request,
                                     const LoadedCheckpoint& loaded,
                                     const std::string& image);
  [[nodiscard]] absl::StatusOr<StepResult> Publish(
      const dispatch::StepTask& step, const PublishSnapshotRequest& request);
  // Returns the result as it was recorded.
  absl::StatusOr<StepResult> Complete(
      const dispatch::StepTask& step, absl::StatusOr<StepResult> result,
      const std::optional<dispatch::AdapterFacts>& facts = std::nullopt);

  const EngineContext& context_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_STEP_EXECUTOR_H_
