// Runs one training micro-batch: pack, forward and head, losses, backward,
// scatter. The replicas share its data.
#ifndef WEFT_SRC_TRAIN_TRAIN_RUNNER_H_
#define WEFT_SRC_TRAIN_TRAIN_RUNNER_H_

#include <vector>

#include "src/config/options.h"
#include "src/executor/executor.h"
#include "src/lora/lora_gradients.h"
#include "src/loss/token_losses.h"
#include "src/train/batch_packer.h"

namespace weft::engine {

// The results of every datum of the pieces.
struct TrainOutcome {
  std::vector<DatumResult> data;  // In the order of the pieces' data.
  // The rows [L, E], i64, of each expert in each layer that has experts.
  // Undefined if the model has none.
  at::Tensor expert_rows_LE;
};

// Selects the layers that a micro-batch recomputes: by policy and budget, or
// all of them after memory ran out.
enum class Recompute { kByBudget, kAll };

struct TrainRunnerOptions {
  bool share_prompts = true;
  GradientCheckpointing checkpointing = GradientCheckpointing::kAuto;
  int64_t memory_budget_bytes = 0;  // 0: no limit.
};

// Threads: engine thread only.
class TrainRunner {
 public:
  // `executor` outlives the runner.
  TrainRunner(executor::Executor* executor, const TrainRunnerOptions& options)
      : executor_(*executor), options_(options) {}

  // Computes the results of every datum of the pieces. Adds to `gradients`, the
  // gradients [N] of their versions; if it is null, runs no backward pass.
  // metrics[p] collects the metrics of piece p. Errors: RESOURCE_EXHAUSTED if
  // the batch cannot fit; then nothing has run. Throws what Executor throws;
  // gradients and metrics may then hold a part of the batch.
  [[nodiscard]] absl::StatusOr<TrainOutcome> Run(
      const std::vector<TrainPiece>& pieces,
      const lora::LoraGradients* gradients,
      const std::vector<loss::MetricSums*>& metrics,
      Recompute recompute = Recompute::kByBudget);
  // Returns whether the last Run kept layers that Recompute::kAll would
  // recompute.
  [[nodiscard]] bool kept_layers() const { return kept_layers_; }

 private:
  // The part of the micro-batch that one replica runs.
  struct Part {
    std::vector<TrainPiece> pieces;
    PackedTrain packed;
  };

  [[nodiscard]] absl::StatusOr<int> NumRecomputed(const Part& part) const;
  // Returns, for each part, the gradients of the versions with which it runs.
  [[nodiscard]] static std::vector<lora::LoraGradients> GradientsOf(
      const std::vector<Part>& parts, const lora::LoraGradients& gradients);

  executor::Executor& executor_;
  const TrainRunnerOptions options_;
  bool kept_layers_ = false;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_TRAIN_RUNNER_H_
