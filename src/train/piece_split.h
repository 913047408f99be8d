// Splits the data of a micro-batch among the replicas.
#ifndef WEFT_SRC_TRAIN_PIECE_SPLIT_H_
#define WEFT_SRC_TRAIN_PIECE_SPLIT_H_

#include <vector>

#include "src/train/batch_packer.h"

namespace weft::engine {

// Returns up to `num_parts` non-empty lists of pieces. Together they have all
// data in order, and each has about equally many tokens. Each list has adjacent
// data, because these may share a prompt. REQUIRES: `pieces` have a datum.
[[nodiscard]] std::vector<std::vector<TrainPiece>> SplitPieces(
    const std::vector<TrainPiece>& pieces, int num_parts);

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_PIECE_SPLIT_H_
