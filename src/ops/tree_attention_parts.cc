#include "src/ops/tree_attention_parts.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::ops {
std::vector<AttentionPart> SelfParts(const std::vector<AttentionNode>& nodes,
                                     bool batch_equal_lengths) {
  std::vector<AttentionPart> parts;
  for (const AttentionNode& node : nodes) {
    const int64_t size = node.end - node.begin;
    if (size == 0) continue;
    // Depth-first order has no gaps: a node starts where the previous one ends.
    if (batch_equal_lengths && !parts.empty() && parts.back().q_size == size) {
      ++parts.back().batch;
      continue;
    }
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
  const bool use_kernel = HasCpuKernel(out_NHC) && is_contiguous;
  if (!use_kernel) {
    const at::Tensor high = at::maximum(lse_NH, part.lse_TH);
    const at::Tensor ours = (lse_NH - high).exp_();
    const at::Tensor theirs = (part.lse_TH - high).exp_();
    const at::Tensor sum = ours + theirs;
    out_NHC.copy_(out_NHC * (ours / sum).unsqueeze(-1) +
                  part.out_THC * (theirs / sum).unsqueeze(-1));
    lse_NH.copy_(high + sum.log());
    return;
  }
  const at::Tensor part_out = part.out_THC.contiguous();
  const at::Tensor part_lse = part.lse_TH.contiguous();
  const int64_t features = out_NHC.size(2);
  const float* part_data = part_out.const_data_ptr<float>();
  const float* part_lse_data = part_lse.const_data_ptr<float>();
  float* out = out_NHC.mutable_data_ptr<float>();
  float* lse = lse_NH.mutable_data_ptr<float>();
  const auto merge = kernels::cpu::Kernels().lse_merge_rows;
  at::parallel_for(
      0, lse_NH.numel(), RowGrain(features), [&](int64_t begin, int64_t end) {
        merge(part_data + begin * features, part_lse_data + begin, end - begin,
              features, out + begin * features, lse + begin);
      });
}

}  // namespace weft::ops
