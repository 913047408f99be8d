// Finds common prefixes of sequences, so that each prefix runs once: a prompt
// with many completions, or a conversation that branches.
#ifndef WEFT_SRC_TRAIN_PREFIX_TREE_H_
#define WEFT_SRC_TRAIN_PREFIX_TREE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "src/ops/tree_attention.h"
#include "src/request/train.h"

namespace weft::engine {

// Rows [begin, begin + count) of the tree.
struct RowSpan {
  int64_t begin = 0;
  int64_t count = 0;
};

// Worked example, "abcd", "abcef" and "abc" if every prefix is worth sharing:
//
//   rows    a b c | d | e f
//   nodes   {0,3,-1,6} {3,4,0,4} {4,6,0,6}
//   spans   {0,3}{3,1} | {0,3}{4,2} | {0,3}
struct PrefixTree {
  std::vector<ops::AttentionNode> nodes;    // Depth first; rows count from 0.
  std::vector<std::vector<RowSpan>> spans;  // For each sequence, in order.
  std::vector<int32_t> tokens;              // Token of each row.
  std::vector<int32_t> positions;           // Position of each row in its
                                            // sequence.
};

// The value of `min_saved_rows` with which no prefix is shared.
inline constexpr int64_t kNeverShare = INT64_MAX;
// One more attention part per layer costs about as much as this many rows.
inline constexpr int64_t kMinSavedRows = 16;

// A common prefix becomes a node of its own if that saves at least
// `min_saved_rows` rows. If it saves fewer, the additional attention part costs
// more. A prefix of N sequences saves N - 1 times its length. With kNeverShare
// every sequence is one node, in the given order.
// Shapes:  sequences are not empty.
// Units:   O(tokens log sequences).
// Threads: any.
[[nodiscard]] PrefixTree BuildPrefixTree(
    const std::vector<absl::Span<const int32_t>>& sequences,
    int64_t min_saved_rows);

// Returns the number of rows, at least one, that `datum` adds to a tree with
// `previous`. This is its size in a micro-batch that holds both. Data that
// share a prompt are adjacent in a request, so slices of this size keep them
// together. Tokens with different routing are not common.
[[nodiscard]] int64_t AddedRows(const Datum& previous, const Datum& datum);

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_PREFIX_TREE_H_
