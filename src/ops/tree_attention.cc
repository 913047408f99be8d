#include "src/ops/tree_attention.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "src/ops/blocked_attention.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

// Returns the number of rows on the longest path from a root.
int64_t LongestPath(const std::vector<AttentionNode>& nodes) {
  std::vector<int64_t> ends(nodes.size(), 0);
  int64_t longest = 0;
  for (size_t i = 0; i < nodes.size(); ++i) {
    ends[i] = nodes[i].end - nodes[i].begin;
    if (nodes[i].parent >= 0) ends[i] += ends[nodes[i].parent];
    longest = std::max(longest, ends[i]);
  }
  return longest;
}

enum class Implementation { kCpuBlocks, kCudaVarlen, kEager };

// Returns how to compute the batch. The flash kernels have neither softcap nor
// window. A window at least as long as the batch's longest path hides nothing.
Implementation Choose(const AttentionInputs& inputs,
                      const std::vector<AttentionNode>& nodes,
                      AttentionMethod method) {
  if (method == AttentionMethod::kEager) return Implementation::kEager;
  if (BlockedSupports(inputs.q_THC)) return Implementation::kCpuBlocks;
  const AttentionRule& rule = inputs.rule;
  const bool plain = rule.softcap <= 0 &&
                     (rule.window == 0 || LongestPath(nodes) <= rule.window);
  return plain && VarlenSupports(inputs.q_THC) ? Implementation::kCudaVarlen
                                               : Implementation::kEager;
}

AttentionOutput ForwardByBlocks(const AttentionInputs& inputs,
                                const std::vector<AttentionNode>& nodes) {
  AttentionOutput result = EmptyOutput(inputs.q_THC);
  BlockedAttention(
      inputs, TreeBlocks(nodes, inputs.rule.window, BlockRows(inputs)), result);
  return result;
}

AttentionOutput WithoutSinks(const AttentionInputs& inputs,
                             const std::vector<AttentionNode>& nodes,
                             AttentionMethod method) {
  switch (Choose(inputs, nodes, method)) {
    case Implementation::kCudaVarlen:
      return VarlenTreeAttention(inputs, nodes);
    case Implementation::kEager:
      return EagerTreeAttention(inputs, nodes);
    case Implementation::kCpuBlocks:
      break;
  }
  return ForwardByBlocks(inputs, nodes);
}

}  // namespace

AttentionOutput TreeAttention(const at::Tensor& q_THC, const at::Tensor& k_TKC,
                              const at::Tensor& v_TKC,
                              const std::vector<AttentionNode>& nodes,
                              const AttentionRule& rule, AttentionMethod method,
                              const at::Tensor& sinks_H) {
  CheckSinks(sinks_H, q_THC);
  AttentionOutput result =
      WithoutSinks({q_THC, k_TKC, v_TKC, rule}, nodes, method);
  AddSinks(sinks_H, result.out_THC, result.lse_TH);
  return result;
}

void TreeAttentionBackward(const at::Tensor& dout_THC, const at::Tensor& q_THC,
                           const at::Tensor& k_TKC, const at::Tensor& v_TKC,
                           const AttentionOutput& forward,
                           const std::vector<AttentionNode>& nodes,
                           const AttentionRule& rule, at::Tensor& dq_THC,
                           at::Tensor& dk_TKC, at::Tensor& dv_TKC,
                           AttentionMethod method) {
  const AttentionInputs inputs{q_THC, k_TKC, v_TKC, rule};
  const AttentionGradients gradients{dq_THC, dk_TKC, dv_TKC};
  const Implementation implementation = Choose(inputs, nodes, method);
  if (implementation == Implementation::kCudaVarlen) {
    VarlenTreeAttentionBackward(dout_THC, inputs, forward, nodes, gradients);
    return;
  }
  const auto allocate = [](const at::Tensor& like, at::Tensor& gradient) {
    if (!gradient.defined()) gradient = at::empty(like.sizes(), like.options());
  };
  allocate(q_THC, dq_THC);
  allocate(k_TKC, dk_TKC);
  allocate(v_TKC, dv_TKC);
  if (implementation == Implementation::kEager) {
    EagerTreeAttentionBackward(dout_THC, inputs, forward, nodes, gradients);
    return;
  }
  BlockedAttentionBackward(dout_THC, inputs, forward,
                           TreeBlocks(nodes, rule.window, BlockRows(inputs)),
                           gradients);
}

}  // namespace weft::ops
