// What attention computes at a time: blocks of queries with the keys that they
// see, cut into chunks. Private to src/ops.
#ifndef WEFT_SRC_OPS_ATTENTION_BLOCKS_H_
#define WEFT_SRC_OPS_ATTENTION_BLOCKS_H_

#include <cstdint>
#include <vector>

#include "src/ops/tree_attention.h"

namespace weft::ops {

struct RowRange {
  int64_t begin = 0;
  int64_t size = 0;
};

// Consecutive query rows of one sequence or of one node of a prefix tree, and
// the key rows that at least one of these queries sees, with a few more before
// them if there is a window. The key rows are in the order of positions. The
// last key and the last query belong to the same token. So query i of n sees
// the keys before position (end_key() - n + i + 1); with a window, only the
// last `window` of these.
struct AttentionBlock {
  RowRange queries;
  std::vector<RowRange> keys;
  int64_t first_key = 0;  // The first key's position in its sequence.
  int64_t tree = 0;       // Blocks of different trees share no key.

  int64_t num_keys() const;
  int64_t end_key() const;  // The position after the last key.
};

// Returns the blocks of prefix trees. A block has at most `max_rows` query rows
// of one node, and keys on the path from the root.
// The blocks cover all rows in order.
std::vector<AttentionBlock> TreeBlocks(const std::vector<AttentionNode>& nodes,
                                       int64_t window, int64_t max_rows);

// Returns the blocks of SuffixAttention. A block has at most `max_rows` query
// rows of one sequence. Every sequence counts as a tree.
std::vector<AttentionBlock> SuffixBlocks(
    const std::vector<SuffixRows>& sequences, int64_t window, int64_t max_rows);

// The keys of a block whose positions are between two multiples of
// kAttentionChunk. They may lie in several places.
struct KeyChunk {
  struct Piece {
    RowRange rows;
    int64_t column = 0;  // The number of the chunk's keys before the piece.
  };

  int64_t first = 0;  // The position of the first key.
  int64_t size = 0;
  std::vector<Piece> pieces;
};

std::vector<KeyChunk> ChunksOf(const AttentionBlock& block);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_ATTENTION_BLOCKS_H_
