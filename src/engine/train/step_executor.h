// Runs the steps that run alone on the device: optimizer steps, saving and
// loading a checkpoint, publishing a snapshot.
#ifndef WEFT_SRC_ENGINE_TRAIN_STEP_EXECUTOR_H_
#define WEFT_SRC_ENGINE_TRAIN_STEP_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/dispatch/work.h"
#include "src/engine/adapters/adapter_io.h"
#include "src/engine/engine_context.h"
#include "src/lora/adapter.h"

namespace weft::engine {

// Threads: engine thread. The I/O thread reads and writes the files.
class StepExecutor {
 public:
  // `context` outlives the executor.
  explicit StepExecutor(const EngineContext* context) : context_(*context) {}

  // Runs the step. A load completes after its files are read, and a save after
  // its files are written, or at once if the state cannot be copied. An
  // optimizer step that takes long runs in parts, one in each call. Any other
  // step completes before this call returns. Until the step completes, no other
  // step of the adapter runs, except a Forward without a step number.
  void Run(const StepTask& step);
  // Runs and completes a step that is an OptimStep or a PublishSnapshot.
  // Returns its result, which may be a StepFailure.
  absl::StatusOr<StepResult> RunNow(const StepTask& step);
  // Gives the adapter of a LoadCheckpoint the state that a checkpoint had after
  // step `last_step`, and completes the step unless this function returns an
  // error. `image` is the file with the log's copy of the state; empty if there
  // is none. Errors: those of ComputeGuard::Guarded.
  absl::Status SetState(const StepTask& step, const lora::AdapterState& state,
                        uint64_t last_step, const std::string& image);

  // Call it when the adapter of a step that has not completed is removed.
  void Forget(uint64_t step_id) { optim_.erase(step_id); }

 private:
  // An optimizer step of which some parts have run.
  struct OptimProgress {
    size_t next_part = 0;
    double norm = 0;  // Of the gradient.
    absl::Duration elapsed;
  };

  // Run a part of the step. Return its result if that was the last one.
  std::optional<absl::StatusOr<StepResult>> RunPart(const StepTask& step);
  std::optional<absl::StatusOr<StepResult>> OptimPart(
      const StepTask& step, const OptimStepRequest& request);
  // Does what Complete does, with the adapter's facts.
  absl::StatusOr<StepResult> End(const StepTask& step,
                                 absl::StatusOr<StepResult> result);
  void Save(const StepTask& step, const SaveCheckpointRequest& request);
  void Write(const StepTask& step, const SaveCheckpointRequest& request,
             const std::shared_ptr<const AdapterCopy>& copy);
  // If the status says that the store does not answer, returns true, and runs
  // `again` when it does: an accepted step neither fails nor stops because of
  // it. Not for a step without a number, whose client calls again.
  bool Repeats(const StepTask& step, const absl::Status& status,
               std::function<void()> again);
  void Load(const StepTask& step, const LoadCheckpointRequest& request);
  // Does what SetState does. More errors: NOT_FOUND if the adapter no longer
  // exists; FAILED_PRECONDITION if the checkpoint's config has another shape
  // than the adapter's.
  absl::Status Install(const StepTask& step,
                       const LoadCheckpointRequest& request,
                       LoadedCheckpoint loaded, const std::string& image);
  absl::StatusOr<StepResult> Publish(const StepTask& step,
                                     const PublishSnapshotRequest& request);
  // Records the result (StoredResult) and completes the step with it. Returns
  // the result, or the error of a step that has none.
  absl::StatusOr<StepResult> Complete(
      const StepTask& step, absl::StatusOr<StepResult> result,
      const std::optional<dispatch::AdapterFacts>& facts = std::nullopt);

  const EngineContext& context_;
  std::map<uint64_t, OptimProgress> optim_;  // By StepTask::id.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_STEP_EXECUTOR_H_
