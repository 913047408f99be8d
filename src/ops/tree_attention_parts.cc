#include "src/ops/tree_attention_parts.h"

#include <ATen/ATen.h>

#include "src/ops/check_argument.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::ops {

std::vector<AttentionPart> SelfParts(const std::vector<AttentionNode>& nodes) {
  std::vector<AttentionPart> parts;
  for (const AttentionNode& node : nodes) {
    const int64_t size = node.end - node.begin;
    if (size == 0) continue;
    parts.push_back({.q_begin = node.begin,
                     .q_size = size,
                     .k_begin = node.begin,
                     .k_size = size});
  }
  return parts;
}

std::vector<std::vector<AttentionPart>> AncestorParts(
    const std::vector<AttentionNode>& nodes) {
  std::vector<std::vector<AttentionPart>> levels;
  std::vector<size_t> depths(nodes.size(), 0);
  for (size_t i = 0; i < nodes.size(); ++i) {
    const AttentionNode& node = nodes[i];
    if (node.parent >= 0) depths[i] = depths[node.parent] + 1;
    if (node.subtree_end == node.end || node.end == node.begin) continue;
    if (levels.size() <= depths[i]) levels.resize(depths[i] + 1);
    levels[depths[i]].push_back({.q_begin = node.end,
                                 .q_size = node.subtree_end - node.end,
                                 .k_begin = node.begin,
                                 .k_size = node.end - node.begin});
  }
  return levels;
}

void MergeByLse(const AttentionOutput& part, at::Tensor& out_NHC,
                at::Tensor& lse_NH) {
  const bool is_contiguous = out_NHC.is_contiguous() && lse_NH.is_contiguous();
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(out_NHC) && is_contiguous) {
      cuda::MergeByLse(part.out_THC, part.lse_TH, out_NHC, lse_NH);
      return;
    }
  }
  const at::Tensor high = at::maximum(lse_NH, part.lse_TH);
  const at::Tensor ours = (lse_NH - high).exp_();
  const at::Tensor theirs = (part.lse_TH - high).exp_();
  const at::Tensor sum = ours + theirs;
  out_NHC.copy_(out_NHC * (ours / sum).unsqueeze(-1) +
                part.out_THC * (theirs / sum).unsqueeze(-1));
  lse_NH.copy_(high + sum.log());
}

AttentionOutput EmptyOutput(const at::Tensor& q_THC) {
  return {at::empty(q_THC.sizes(), q_THC.options()),
          at::empty({q_THC.size(0), q_THC.size(1)},
                    q_THC.options().dtype(ComputeType(q_THC)))};
}

void CheckSinks(const at::Tensor& sinks_H, const at::Tensor& q_THC) {
  if (!sinks_H.defined()) return;
  CheckArgument("sinks_H", sinks_H, q_THC, ComputeType(q_THC), {q_THC.size(1)});
}

void AddSinks(const at::Tensor& sinks_H, at::Tensor& out_NHC,
              at::Tensor& lse_NH) {
  if (!sinks_H.defined()) return;
  // share_NH is the part of the softmax that the sink leaves to the keys.
  const at::Tensor share_NH = (lse_NH - sinks_H).sigmoid_();
  out_NHC.mul_(share_NH.unsqueeze(-1));
  lse_NH.copy_(at::logaddexp(lse_NH, sinks_H));
}

}  // namespace weft::ops
