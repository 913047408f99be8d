#include "src/ops/attention_blocks.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/paged_attention.h"
#include "kernels/cpu/row_arguments.h"

namespace weft::ops {
namespace {

using kernels::cpu::kAttentionChunk;
using kernels::cpu::kSoftmaxPadding;

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

// Returns the position of the first key that a block needs, whose last `rows`
// tokens end a sequence of `keys` tokens. Vectors of scores begin where those
// of the whole chunk do, so that sums over keys have the same bits.
int64_t FirstKey(int64_t keys, int64_t rows, int64_t window) {
  if (window == 0) return 0;
  const int64_t first = std::max<int64_t>(0, keys - (rows + window - 1));
  return first / kSoftmaxPadding * kSoftmaxPadding;
}

}  // namespace

int64_t AttentionBlock::num_keys() const {
  int64_t count = 0;
  for (const RowRange& range : keys) count += range.size;
  return count;
}

int64_t AttentionBlock::end_key() const { return first_key + num_keys(); }

std::vector<AttentionBlock> TreeBlocks(const std::vector<AttentionNode>& nodes,
                                       int64_t window, int64_t max_rows) {
  std::vector<AttentionBlock> blocks;
  // For each node, the number of rows on the path before it.
  std::vector<int64_t> depths;
  int64_t tree = -1;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const AttentionNode& node = nodes[i];
    if (node.parent < 0) ++tree;
    const AttentionNode* parent =
        node.parent < 0 ? nullptr : &nodes[node.parent];
    depths.push_back(parent == nullptr
                         ? 0
                         : depths[node.parent] + parent->end - parent->begin);
    for (int64_t row = node.begin; row < node.end; row += max_rows) {
      const int64_t size = std::min(max_rows, node.end - row);
      const int64_t last = depths[i] + row + size - node.begin;
      const int64_t first = FirstKey(last, size, window);
      blocks.push_back({.queries = {row, size},
                        .keys = PathRows(nodes, static_cast<int64_t>(i),
                                         row + size, last - first),
                        .first_key = first,
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
      const int64_t first = FirstKey(end, size, window);
      blocks.push_back({.queries = {rows.q_begin + row, size},
                        .keys = {{rows.k_begin + first, end - first}},
                        .first_key = first,
                        .tree = tree});
    }
    ++tree;
  }
  return blocks;
}

std::vector<KeyChunk> ChunksOf(const AttentionBlock& block) {
  std::vector<KeyChunk> chunks;
  int64_t position = block.first_key;
  for (const RowRange& range : block.keys) {
    for (int64_t done = 0; done < range.size;) {
      if (chunks.empty() || position % kAttentionChunk == 0) {
        chunks.push_back({.first = position});
      }
      KeyChunk& chunk = chunks.back();
      const int64_t size = std::min(
          kAttentionChunk - position % kAttentionChunk, range.size - done);
      chunk.pieces.push_back({{range.begin + done, size}, chunk.size});
      chunk.size += size;
      position += size;
      done += size;
    }
  }
  return chunks;
}

}  // namespace weft::ops
