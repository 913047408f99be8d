// Splits the data of a micro-batch among the replicas.
#ifndef WEFT_SRC_ENGINE_PIECE_SPLIT_H_
#define WEFT_SRC_ENGINE_PIECE_SPLIT_H_

#include <vector>

#include "src/engine/batch_packer.h"

namespace weft::engine {

// Returns up to `num_parts` non-empty lists of pieces with about equal numbers
// of tokens. Concatenated, the lists have all data in order, because adjacent
// data may share a prompt. REQUIRES: `pieces` has at least one datum.
[[nodiscard]] std::vector<std::vector<TrainPiece>> SplitPieces(
    const std::vector<TrainPiece>& pieces, int num_parts);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_PIECE_SPLIT_H_
