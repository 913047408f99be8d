#include "src/ops/attention_blocks.h"

#include <algorithm>
#include <limits>

namespace weft::ops {
namespace {

// Returns the last `count` rows (or all, if fewer) of the path that leads from
// the root to `node` and ends before row `end`.
std::vector<RowRange> PathRows(const std::vector<AttentionNode>& nodes,
                               int64_t node, int64_t end, int64_t count) {
  std::vector<RowRange> ranges;
  while (node >= 0 && count > 0) {
    const int64_t size = std::min(count, end - nodes[node].begin);
    if (size > 0) ranges.push_back({end - size, size});
    count -= size;
    node = nodes[node].parent;
    if (node >= 0) end = nodes[node].end;
  }
  std::ranges::reverse(ranges);
  return ranges;
}

// A sequence has `keys` keys. Returns how many of them are seen by at least one
// of the sequence's last `rows` tokens.
int64_t VisibleKeys(int64_t keys, int64_t rows, int64_t window) {
  return window > 0 ? std::min(keys, rows + window - 1) : keys;
}

}  // namespace

int64_t AttentionBlock::num_keys() const {
  int64_t count = 0;
  for (const RowRange& range : keys) count += range.size;
  return count;
}

std::vector<AttentionBlock> TreeBlocks(const std::vector<AttentionNode>& nodes,
                                       int64_t window, int64_t max_rows) {
  std::vector<AttentionBlock> blocks;
  int64_t tree = -1;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].parent < 0) ++tree;
    for (int64_t row = nodes[i].begin; row < nodes[i].end; row += max_rows) {
      const int64_t size = std::min(max_rows, nodes[i].end - row);
      const int64_t keys =
          VisibleKeys(std::numeric_limits<int64_t>::max(), size, window);
      blocks.push_back(
          {.queries = {row, size},
           .keys = PathRows(nodes, static_cast<int64_t>(i), row + size, keys),
           .tree = tree});
    }
  }
  return blocks;
}

std::vector<AttentionBlock> SuffixBlocks(
    const std::vector<SuffixRows>& sequences, int64_t window,
    int64_t max_rows) {
  std::vector<AttentionBlock> blocks;
  int64_t tree = 0;
  for (const SuffixRows& rows : sequences) {
    for (int64_t row = 0; row < rows.q_size; row += max_rows) {
      const int64_t size = std::min(max_rows, rows.q_size - row);
      const int64_t end = rows.k_size - rows.q_size + row + size;
      const int64_t keys = VisibleKeys(end, size, window);
      blocks.push_back({.queries = {rows.q_begin + row, size},
                        .keys = {{rows.k_begin + end - keys, keys}},
                        .tree = tree});
    }
    ++tree;
  }
  return blocks;
}

}  // namespace weft::ops
