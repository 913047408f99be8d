// Deals the data of a micro-batch out to the replicas.
#ifndef WEFT_SRC_TRAIN_PIECE_SPLIT_H_
#define WEFT_SRC_TRAIN_PIECE_SPLIT_H_

#include <vector>

#include "src/train/batch_packer.h"

namespace weft::engine {

// At most `num_parts` lists of pieces, none of them empty, with all data in
// their order and about as many tokens each. Data stay next to their
// neighbours, with whom they may have a prompt in common.
[[nodiscard]] std::vector<std::vector<TrainPiece>> SplitPieces(
    const std::vector<TrainPiece>& pieces, int num_parts);

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_PIECE_SPLIT_H_
