// Runs one training micro-batch: pack, forward, head, losses, backward,
// scatter.
#ifndef WEFT_SRC_ENGINE_TRAIN_RUNNER_H_
#define WEFT_SRC_ENGINE_TRAIN_RUNNER_H_

#include <vector>

#include "src/config/options.h"
#include "src/engine/batch_packer.h"
#include "src/loss/fused_head.h"
#include "src/loss/token_losses.h"
#include "src/model/decoder.h"

namespace weft::engine {

// Results of one datum with what its loss adds to the request's metrics.
struct TrainOutcome {
  std::vector<DatumResult> data;  // In the order of the pieces' data.
};

struct TrainRunnerOptions {
  loss::HeadOptions head;
  bool share_prompts = true;
  GradientCheckpointing checkpointing = GradientCheckpointing::kAuto;
  int64_t memory_budget_bytes = 0;  // 0: no limit.
};

// Threads: engine thread only.
class TrainRunner {
 public:
  TrainRunner(const model::Decoder& decoder, const TrainRunnerOptions& options)
      : decoder_(decoder), options_(options) {}

  // Computes the results of every datum of the pieces; with `backward` also
  // adds each adapter's gradient to its pieces' gradient_N. metrics[p] collects
  // for piece p. Errors: RESOURCE_EXHAUSTED before anything ran when the batch
  // cannot fit; throws c10::Error, and gradients may then hold a part of it.
  [[nodiscard]] absl::StatusOr<TrainOutcome> Run(
      const std::vector<TrainPiece>& pieces, bool backward,
      const std::vector<loss::MetricSums*>& metrics);

 private:
  [[nodiscard]] absl::StatusOr<int> NumRecomputed(
      const std::vector<TrainPiece>& pieces, const PackedTrain& packed) const;

  const model::Decoder& decoder_;
  const TrainRunnerOptions options_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_RUNNER_H_
