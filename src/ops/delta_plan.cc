#include "src/ops/delta_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace weft::ops {
namespace {

// Finds the rows before a row on its path.
struct RowFinder {
  const std::vector<AttentionNode>& nodes;
  int64_t num_earlier;
  DeltaStateUse use;

  // Appends the rows before row `t` of node `n`, or before the row after it if
  // t is its end. `root` is the number of its root among all roots.
  void Append(int64_t n, int64_t t, int64_t root,
              std::vector<int64_t>& rows) const {
    for (int64_t r = 0; r < num_earlier; ++r) {
      int64_t steps = num_earlier - r;
      int64_t row = t;
      int64_t node = n;
      while (steps > row - nodes[node].begin && nodes[node].parent >= 0) {
        steps -= row - nodes[node].begin;
        node = nodes[node].parent;
        row = nodes[node].end;
      }
      const int64_t before = steps - (row - nodes[node].begin);
      rows.push_back(before <= 0 ? row - steps : BeforeRoot(root, before));
    }
  }

 private:
  // Returns the row `steps` before the first row of a root.
  int64_t BeforeRoot(int64_t root, int64_t steps) const {
    if (use != DeltaStateUse::kContinue) return -1;
    return nodes.back().end + (root + 1) * num_earlier - steps;
  }
};

}  // namespace

DeltaTrees::DeltaTrees(std::vector<AttentionNode> nodes, at::Tensor slots_Q)
    : nodes_(std::move(nodes)), slots_Q_(std::move(slots_Q)) {}

DeltaTrees::~DeltaTrees() = default;

const DeltaPlan& DeltaTrees::Plan(DeltaStateUse use,
                                  int64_t num_earlier) const {
  std::unique_ptr<DeltaPlan>& plan = plans_[static_cast<size_t>(use)];
  if (plan == nullptr) {
    plan = std::make_unique<DeltaPlan>(PlanDelta(nodes_, num_earlier, use));
    if (use == DeltaStateUse::kContinue) plan->slots_Q = slots_Q_;
  }
  TORCH_CHECK(std::ssize(plan->earlier_TR) ==
                  (nodes_.empty() ? 0 : nodes_.back().end) * num_earlier,
              "a plan of the gated delta rule has ", plan->earlier_TR.size(),
              " earlier rows, wanted ", num_earlier, " for each row");
  return *plan;
}

DeltaPlan PlanDelta(const std::vector<AttentionNode>& nodes,
                    int64_t num_earlier, DeltaStateUse use) {
  DeltaPlan plan;
  const RowFinder finder{nodes, num_earlier, use};
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
    for (int64_t t = node.begin; t < node.end; ++t) {
      finder.Append(n, t, root, plan.earlier_TR);
    }
    const bool continues = use == DeltaStateUse::kContinue;
    if (continues) finder.Append(n, node.end, root, plan.last_QR);
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
