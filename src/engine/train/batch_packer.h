// Packs the data of many requests into flat tensors: tokens, positions, nodes
// of prefix trees, segments (consecutive rows of one adapter version) and score
// rows. A score row is a row that the head evaluates; each of its targets is an
// entry.
#ifndef WEFT_SRC_ENGINE_TRAIN_BATCH_PACKER_H_
#define WEFT_SRC_ENGINE_TRAIN_BATCH_PACKER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/engine/train/prefix_tree.h"
#include "src/executor/plan.h"
#include "src/loss/fused_head.h"
#include "src/model/packed_batch.h"
#include "src/request/train.h"

namespace weft::engine {

// Consecutive data of one request that go into the batch. In a list of pieces,
// the pieces of one adapter version are adjacent.
struct TrainPiece {
  const TrainRequest* request = nullptr;
  int64_t first_datum = 0;
  int64_t num_data = 0;
  lora::AdapterVersionPtr version;  // Null: the base model.
  // The teacher, if the loss has one. Null: the base model.
  lora::AdapterVersionPtr teacher;
};

// The indices of one datum's score rows and entries in the batch. Two data
// share a score row if they share the batch row and have the same temperature
// and gradient filter, and no support there.
struct PackedDatum {
  const TrainRequest* request = nullptr;
  const Datum* datum = nullptr;
  std::vector<int64_t> rows;     // Score row of each scored token, in order.
  std::vector<int64_t> entries;  // Entry of each scored target, in order.
  std::vector<RowSpan> spans;    // Batch rows of the tokens, in order.
};

struct PackedTrain {
  model::PackedBatch batch;
  at::Tensor score_index_R;  // [R] i64: the batch row of each score row.
  loss::ScoreRows rows;
  executor::DistillPlan distill;
  std::vector<PackedDatum> data;  // In the order of the pieces.
};

// Returns whether the head scores target number `target` of the datum: the
// target's weight is not 0, the datum has no weights, or `loss` scores all
// targets.
bool IsScored(const LossConfig& loss, const Datum& datum, int64_t target);

// Packs pieces into tensors on the host. With `share_prompts`, data of one
// adapter version share the rows of a common prefix if this saves enough rows
// (prefix_tree.h). The gradients of shared rows add up.
PackedTrain PackTrain(const std::vector<TrainPiece>& pieces,
                      bool share_prompts);

// Splits the data of a micro-batch among the replicas. Returns up to
// `num_parts` non-empty lists of pieces with about equal numbers of tokens.
// Concatenated, the lists have all data in order, because adjacent data may
// share a prompt. REQUIRES: `pieces` has at least one datum.
std::vector<std::vector<TrainPiece>> SplitPieces(
    const std::vector<TrainPiece>& pieces, int num_parts);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_BATCH_PACKER_H_
