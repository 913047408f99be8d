// Runs training micro-batches: turns a plan's slices into pieces, and gives the
// results to the requests.
#ifndef WEFT_SRC_TRAIN_BATCH_TRAINER_H_
#define WEFT_SRC_TRAIN_BATCH_TRAINER_H_

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/adapters/engine_context.h"
#include "src/dispatch/work.h"
#include "src/loss/token_losses.h"
#include "src/train/train_runner.h"

namespace weft::engine {

// Threads: engine thread only.
class BatchTrainer {
 public:
  // `context` and `executor` outlive the trainer.
  BatchTrainer(const EngineContext* context, executor::Executor* executor);

  // Runs one micro-batch and ends its slices. If the batch fails, returns the
  // error: all its requests fail, and every adapter stays as it was.
  absl::Status Run(const dispatch::RunTrain& train);
  // Drops the progress of a request that ended between two of its slices.
  void Forget(uint64_t step_id) {
    progress_.erase(step_id);
    context_.recorder.Forget(step_id);
  }

 private:
  // The results of a request's slices so far.
  struct Progress {
    TrainResult result;
    loss::MetricSums metrics;
  };
  // A plan's slices, ready to run.
  struct MicroBatch;

  // Ends the slices whose weights no longer exist. Returns the others.
  [[nodiscard]] dispatch::RunTrain Runnable(const dispatch::RunTrain& train);
  // Returns the weights with which a request runs; null for the base model
  // alone. Errors: NOT_FOUND (its snapshot no longer exists).
  [[nodiscard]] absl::StatusOr<lora::AdapterVersionPtr> VersionOf(
      const dispatch::StepTask& step) const;
  [[nodiscard]] MicroBatch MakeMicroBatch(const dispatch::RunTrain& train);
  [[nodiscard]] absl::Status RunSlices(const dispatch::RunTrain& train);
  // Runs the batch once. Adds gradients to the adapters' scratch.
  [[nodiscard]] absl::StatusOr<TrainOutcome> TryBatch(MicroBatch& batch,
                                                      Recompute recompute);
  void FinishRequest(const dispatch::StepTask& step);

  const EngineContext& context_;
  TrainRunner runner_;
  std::unordered_map<uint64_t, Progress> progress_;  // Keys: step id.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_BATCH_TRAINER_H_
