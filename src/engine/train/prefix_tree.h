// Finds common prefixes of sequences, so that the model computes each prefix
// only once: a prompt with many completions, or a conversation that branches.
#ifndef WEFT_SRC_ENGINE_TRAIN_PREFIX_TREE_H_
#define WEFT_SRC_ENGINE_TRAIN_PREFIX_TREE_H_

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "src/ops/tree_attention.h"
#include "src/request/train.h"

namespace weft::engine {

// Rows [begin, begin + count) of the tree.
struct RowSpan {
  int64_t begin = 0;
  int64_t count = 0;
};

// An example: the tree of "abcd", "abcef" and "abc" if all prefixes are shared.
// A node is {begin, end, parent, subtree_end}, and a span is {begin, count}.
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
// An additional node costs each layer about as much time as this many rows,
// because the attention of each node is computed separately.
inline constexpr int64_t kMinSavedRows = 16;

// Builds the tree of `sequences`, which are not empty. A common prefix becomes
// a node only if the node saves at least `min_saved_rows` rows, because each
// node also costs time. A node of N sequences saves N - 1 times its length.
// With kNeverShare every sequence is one node, in the given order. Takes
// O(tokens log sequences) time. Threads: any.
PrefixTree BuildPrefixTree(
    const std::vector<absl::Span<const int32_t>>& sequences,
    int64_t min_saved_rows);

// Estimates how many rows `datum` adds to a tree that already has `previous`,
// the datum before `datum` in the request. Returns at least 1. The scheduler
// uses this number for the cost of `datum`. The two data share a token's row
// only if the token has the same routing in both.
int64_t AddedRows(const Datum& previous, const Datum& datum);

// Returns the values of datum.routing that belong to token `index`; empty if
// the datum has no routing.
absl::Span<const uint16_t> RoutingOf(const Datum& datum, int64_t index);

// Gives an id to each pair of a token and its routing: the experts that the
// request wants for the token. The prefix tree compares these ids, so that data
// share rows only if their tokens go to the same experts.
// Threads: not thread-safe.
class RoutedTokens {
 public:
  // Returns one id for each token of the datum. Two ids are equal if and only
  // if both tokens and both routings are equal. The datum outlives this object,
  // which owns the ids.
  absl::Span<const int32_t> IdsOf(const Datum& datum);

  int32_t token(int32_t id) const { return keys_[id].first; }
  // Returns the experts of the id's token; empty if the router chooses them.
  absl::Span<const uint16_t> routing(int32_t id) const {
    return keys_[id].second;
  }

 private:
  using Key = std::pair<int32_t, absl::Span<const uint16_t>>;

  absl::flat_hash_map<Key, int32_t> ids_;
  std::vector<Key> keys_;
  std::deque<std::vector<int32_t>> sequences_;  // Addresses stay valid.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_PREFIX_TREE_H_
