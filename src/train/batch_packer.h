// Packs the data of many requests into flat tensors: tokens, positions, nodes,
// adapter segments and score rows.
#ifndef WEFT_SRC_TRAIN_BATCH_PACKER_H_
#define WEFT_SRC_TRAIN_BATCH_PACKER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/loss/fused_head.h"
#include "src/model/packed_batch.h"
#include "src/request/train.h"
#include "src/train/prefix_tree.h"

namespace weft::engine {

// The data of one request that go into the batch. Pieces of one adapter are
// adjacent.
struct TrainPiece {
  const TrainRequest* request = nullptr;
  int64_t first_datum = 0;
  int64_t num_data = 0;
  lora::AdapterVersionPtr version;  // Null: the base model.
};

// The indices of one datum's results among the score rows and entries. Data
// that share a row of the batch also share its score rows if temperature and
// filter are equal.
struct PackedDatum {
  const TrainRequest* request = nullptr;
  const Datum* datum = nullptr;
  std::vector<int64_t> rows;     // One for each scored position, in order.
  std::vector<int64_t> entries;  // One for each scored target, in order.
  std::vector<RowSpan> spans;    // The batch rows of its tokens, in order.
};

struct PackedTrain {
  model::PackedBatch batch;
  at::Tensor score_index_R;  // [R] i64: the batch row of each score row.
  loss::ScoreRows rows;
  std::vector<PackedDatum> data;  // In the order of the pieces.
};

// Returns whether a target, given by its index in the datum, is scored: its
// weight is not 0, or `loss` scores all targets.
[[nodiscard]] bool IsScored(const LossConfig& loss, const Datum& datum,
                            int64_t target);

// Packs pieces into tensors on the host. With `share_prompts`, data of one
// adapter share the rows of their common prefixes (prefix_tree.h), and the
// gradients of these rows add up.
[[nodiscard]] PackedTrain PackTrain(const std::vector<TrainPiece>& pieces,
                                    bool share_prompts);

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_BATCH_PACKER_H_
