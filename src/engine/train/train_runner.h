// Runs one training micro-batch: packs the data, runs the forward pass and the
// head, computes losses and results, and runs the backward pass. The replicas
// share the data.
#ifndef WEFT_SRC_ENGINE_TRAIN_TRAIN_RUNNER_H_
#define WEFT_SRC_ENGINE_TRAIN_TRAIN_RUNNER_H_

#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/options/options.h"
#include "src/engine/train/batch_packer.h"
#include "src/executor/executor.h"
#include "src/lora/adapter.h"
#include "src/loss/token_losses.h"

namespace weft::engine {

// The results of every datum of the pieces.
struct TrainOutcome {
  std::vector<DatumResult> data;          // In the order of the pieces' data.
  std::vector<loss::MetricSums> metrics;  // Those of each piece.
  // [L, E] i64: the number of rows that each of the E experts had in each of
  // the L layers with experts. Undefined if the model has no experts.
  at::Tensor expert_rows_LE;
  // Why a request's custom loss failed. If there is any, there was no backward
  // pass, and `data` has no use: the others must run without these requests.
  std::map<const TrainRequest*, absl::Status> failed;
  // How long the custom losses of each request took, also of those that failed.
  std::map<const TrainRequest*, absl::Duration> loss_time;
};

// Selects the layers that a micro-batch recomputes: as few as policy and budget
// permit, or all layers after memory ran out.
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

  // Computes the results of every datum of the pieces. `gradients` has a
  // gradient [N parameters] for each adapter version, and the backward pass
  // adds to it. If `gradients` is null, there is no backward pass. metrics[p]
  // has the metrics of earlier data of piece p's request, to which those of the
  // outcome add. Copies of teachers take `copy_bytes` of the memory
  // budget. Errors: RESOURCE_EXHAUSTED if the batch cannot fit; nothing has run
  // then. Throws what Executor throws; gradients may then hold a part of the
  // batch.
  absl::StatusOr<TrainOutcome> Run(const std::vector<TrainPiece>& pieces,
                                   const lora::LoraGradients* gradients,
                                   std::vector<loss::MetricSums> metrics,
                                   Recompute recompute = Recompute::kByBudget,
                                   int64_t copy_bytes = 0);
  // Returns whether the last Run kept the activations of layers that another
  // Run could recompute. False unless the policy is
  // GradientCheckpointing::kAuto.
  bool kept_layers() const { return kept_layers_; }

 private:
  // The part of the micro-batch that one replica runs.
  struct Part {
    std::vector<TrainPiece> pieces;
    PackedTrain packed;
  };

  // Computes the results of all data, and puts the gradients of each part's
  // entries into `gradients_E`. `metrics` are those of Run.
  static TrainOutcome Scatter(const std::vector<TrainPiece>& pieces,
                              const std::vector<Part>& parts,
                              const std::vector<executor::TrainScores>& scores,
                              std::vector<loss::MetricSums> metrics,
                              bool backward,
                              std::vector<at::Tensor>* gradients_E);
  // Returns how many layers the backward pass recomputes, 0 without one.
  // Errors: RESOURCE_EXHAUSTED if the part does not fit the budget.
  absl::StatusOr<int> NumRecomputed(const Part& part, bool backward,
                                    int64_t copy_bytes) const;
  // Returns one list for each part. The list has the gradients of the adapter
  // versions that the part uses.
  static std::vector<lora::LoraGradients> GradientsOf(
      const std::vector<Part>& parts, const lora::LoraGradients& gradients);

  executor::Executor& executor_;
  const TrainRunnerOptions options_;
  bool kept_layers_ = false;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_TRAIN_RUNNER_H_
