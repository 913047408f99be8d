// Runs one training micro-batch: pack, forward, head, losses, backward,
// scatter.
#ifndef WEFT_SRC_ENGINE_TRAIN_RUNNER_H_
#define WEFT_SRC_ENGINE_TRAIN_RUNNER_H_

#include <vector>

#include "src/engine/batch_packer.h"
#include "src/loss/fused_head.h"
#include "src/loss/token_losses.h"
#include "src/model/decoder.h"

namespace weft::engine {

// Results of one datum with what its loss adds to the request's metrics.
struct TrainOutcome {
  std::vector<DatumResult> data;  // In the order of the pieces' data.
};

// Threads: engine thread only.
class TrainRunner {
 public:
  TrainRunner(const model::Decoder& decoder, loss::HeadOptions head)
      : decoder_(decoder), head_(head) {}

  // Computes the results of every datum of the pieces; with `backward` also
  // adds each adapter's gradient to its pieces' gradient_N. metrics[p] collects
  // for piece p. Errors: throws c10::Error; gradients may then hold a part of
  // the batch.
  [[nodiscard]] TrainOutcome Run(const std::vector<TrainPiece>& pieces,
                                 bool backward,
                                 const std::vector<loss::MetricSums*>& metrics);

 private:
  const model::Decoder& decoder_;
  const loss::HeadOptions head_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_RUNNER_H_
