// Runs the micro-batches of training: a plan's slices to pieces, their results
// to the requests.
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

  // Runs one micro-batch and ends its slices. A batch that fails fails all of
  // its requests, leaves every adapter as it was, and its error is returned.
  absl::Status Run(const dispatch::RunTrain& train);
  // The request ended elsewhere, between two of its slices.
  void Forget(uint64_t step_id) {
    progress_.erase(step_id);
    context_.recorder.Forget(step_id);
  }

 private:
  // What a request has so far, over its slices.
  struct Progress {
    TrainResult result;
    loss::MetricSums metrics;
  };
  // A plan's slices, ready to run.
  struct MicroBatch;

  [[nodiscard]] MicroBatch MakeMicroBatch(const dispatch::RunTrain& train);
  [[nodiscard]] absl::Status RunSlices(const dispatch::RunTrain& train);
  // Runs it once, up to the adapters' scratch.
  [[nodiscard]] absl::StatusOr<TrainOutcome> TryBatch(MicroBatch& batch,
                                                      Recompute recompute);
  void FinishRequest(const dispatch::StepTask& step);

  const EngineContext& context_;
  TrainRunner runner_;
  std::unordered_map<uint64_t, Progress> progress_;  // By step id.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_BATCH_TRAINER_H_
