#include "src/ops/delta_plan.h"

#include <algorithm>

namespace weft::ops {
namespace {

// Returns the row `steps` before the first row of a root, which is number
// `root`.
int64_t RowBeforeRoot(int64_t num_rows, int64_t num_earlier, int64_t root,
                      int64_t steps, DeltaStateUse use) {
  if (use != DeltaStateUse::kContinue) return -1;
  return num_rows + (root + 1) * num_earlier - steps;
}

// Appends the rows before the rows of node `n`. `root` is the number of its
// root among all roots.
void AppendEarlier(const std::vector<AttentionNode>& nodes, int64_t n,
                   int64_t root, int64_t num_earlier, DeltaStateUse use,
                   std::vector<int64_t>& earlier_TR) {
  for (int64_t t = nodes[n].begin; t < nodes[n].end; ++t) {
    for (int64_t r = 0; r < num_earlier; ++r) {
      int64_t steps = num_earlier - r;
      int64_t row = t;
      int64_t node = n;
      while (steps > row - nodes[node].begin && nodes[node].parent >= 0) {
        steps -= row - nodes[node].begin;
        node = nodes[node].parent;
        row = nodes[node].end;
      }
      const int64_t first = nodes[node].begin;
      earlier_TR.push_back(steps <= row - first
                               ? row - steps
                               : RowBeforeRoot(nodes.back().end, num_earlier,
                                               root, steps - (row - first),
                                               use));
    }
  }
}

}  // namespace

DeltaPlan PlanDelta(const std::vector<AttentionNode>& nodes,
                    int64_t num_earlier, DeltaStateUse use) {
  DeltaPlan plan;
  const auto num_nodes = static_cast<int64_t>(nodes.size());
  std::vector<bool> has_child(num_nodes, false);
  for (const AttentionNode& node : nodes) {
    if (node.parent >= 0) has_child[node.parent] = true;
  }
  std::vector<int64_t> stop_of_node(num_nodes, -1);
  int64_t root = -1;
  for (int64_t n = 0; n < num_nodes; ++n) {
    const AttentionNode& node = nodes[n];
    if (node.parent < 0) {
      ++root;
      plan.tree_chunks.push_back(static_cast<int64_t>(plan.chunks.size()));
    }
    AppendEarlier(nodes, n, root, num_earlier, use, plan.earlier_TR);
    const bool continues = use == DeltaStateUse::kContinue;
    int64_t start = node.parent >= 0 ? stop_of_node[node.parent] : -1;
    if (continues) start = plan.num_states++;
    int64_t own = continues ? start : -1;
    for (int64_t row = node.begin; row < node.end; row += kDeltaChunkRows) {
      DeltaChunk chunk{.begin = row,
                       .end = std::min(row + kDeltaChunkRows, node.end),
                       .start = start};
      if (chunk.end < node.end || has_child[n] || continues) {
        if (own < 0 || use == DeltaStateUse::kKeep) own = plan.num_states++;
        chunk.stop = own;
      }
      plan.chunks.push_back(chunk);
      start = chunk.stop;
    }
    stop_of_node[n] = start;
  }
  plan.tree_chunks.push_back(static_cast<int64_t>(plan.chunks.size()));
  return plan;
}

}  // namespace weft::ops
