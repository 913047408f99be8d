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
  // `context` and `executor` outlive it.
  BatchTrainer(const EngineContext* context, executor::Executor* executor);

  // Runs one micro-batch and ends its slices. If the batch fails, all its
  // requests fail, every adapter stays as it was, and the error is returned.
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

  // Ends the slices that have no weights to run with; returns the others.
  [[nodiscard]] dispatch::RunTrain Runnable(const dispatch::RunTrain& train);
  // The weights that a request is run with; null: the base model's alone.
  // NOT_FOUND: its snapshot is gone.
  [[nodiscard]] absl::StatusOr<lora::AdapterVersionPtr> VersionOf(
      const dispatch::StepTask& step) const;
  [[nodiscard]] MicroBatch MakeMicroBatch(const dispatch::RunTrain& train);
  [[nodiscard]] absl::Status RunSlices(const dispatch::RunTrain& train);
  // Runs the batch once. Gradients go to the adapters' scratch.
  [[nodiscard]] absl::StatusOr<TrainOutcome> TryBatch(MicroBatch& batch,
                                                      Recompute recompute);
  void FinishRequest(const dispatch::StepTask& step);

  const EngineContext& context_;
  TrainRunner runner_;
  std::unordered_map<uint64_t, Progress> progress_;  // By step id.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_BATCH_TRAINER_H_
