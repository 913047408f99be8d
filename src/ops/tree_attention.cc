#include "src/ops/tree_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "src/ops/cpu_dispatch.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

// Legend: B runs of a batched part, Q query rows and S key rows of a run.

// Returns a view of rows [begin, begin + batch * size) as [B, M, size, C].
at::Tensor Runs(const at::Tensor& x_TMC, int64_t begin, int64_t batch,
                int64_t size) {
  return x_TMC.narrow(0, begin, batch * size)
      .unflatten(0, {batch, size})
      .transpose(1, 2);
}

// Inverts Runs: turns [B, M, size, C] into [B * size, M, C].
at::Tensor Rows(const at::Tensor& x_BMSC) {
  return x_BMSC.transpose(1, 2).flatten(0, 1);
}

// Views of one part's tensors.
struct PartView {
  PartView(const AttentionInputs& inputs, const AttentionPart& part)
      : q_BHQC(Runs(inputs.q_THC, part.q_begin, part.batch, part.q_size)),
        k_BKSC(Runs(inputs.k_TKC, part.k_begin, part.batch, part.k_size)),
        v_BKSC(Runs(inputs.v_TKC, part.k_begin, part.batch, part.k_size)),
        scale(inputs.rule.scale) {}

  at::Tensor q_BHQC;
  at::Tensor k_BKSC;
  at::Tensor v_BKSC;
  double scale;
};

// What the backward pass of one part reads beside PartView.
struct UpstreamView {
  at::Tensor dout_BHQC;
  at::Tensor out_BHQC;
  at::Tensor lse_BHQ;
};

using OutAndLse = std::tuple<at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

OutAndLse FlashForward(const PartView& part, bool causal) {
  return at::_scaled_dot_product_flash_attention_for_cpu(
      part.q_BHQC, part.k_BKSC, part.v_BKSC, /*dropout_p=*/0.0, causal,
      /*attn_mask=*/{}, part.scale);
}

Gradients FlashBackward(const PartView& part, const UpstreamView& up,
                        bool causal) {
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      up.dout_BHQC, part.q_BHQC, part.k_BKSC, part.v_BKSC, up.out_BHQC,
      up.lse_BHQ, /*dropout_p=*/0.0, causal, /*attn_mask=*/{}, part.scale);
}

AttentionOutput PartForward(const AttentionInputs& inputs,
                            const AttentionPart& part, bool causal) {
  const auto [out_BHQC, lse_BHQ] = FlashForward(PartView(inputs, part), causal);
  return {Rows(out_BHQC), lse_BHQ.transpose(1, 2).flatten(0, 1)};
}

// Returns dq, dk, dv of a part as rows [N, M, C].
Gradients PartBackward(const at::Tensor& dout_THC,
                       const AttentionInputs& inputs,
                       const AttentionOutput& forward,
                       const AttentionPart& part, bool causal) {
  const auto runs = [&](const at::Tensor& x) {
    return Runs(x, part.q_begin, part.batch, part.q_size);
  };
  const UpstreamView up{runs(dout_THC), runs(forward.out_THC),
                        runs(forward.lse_TH)};
  const auto [dq, dk, dv] = FlashBackward(PartView(inputs, part), up, causal);
  return {Rows(dq), Rows(dk), Rows(dv)};
}

AttentionOutput ForwardByParts(const AttentionInputs& inputs,
                               const std::vector<AttentionNode>& nodes) {
  const auto self_parts = SelfParts(nodes, /*batch_equal_lengths=*/true);
  const auto levels = AncestorParts(nodes);
  AttentionOutput result;
  if (self_parts.size() == 1) {
    result = PartForward(inputs, self_parts[0], /*causal=*/true);
  } else {
    result.out_THC = at::empty(inputs.q_THC.sizes(), inputs.q_THC.options());
    result.lse_TH =
        at::empty({inputs.q_THC.size(0), inputs.q_THC.size(1)},
                  inputs.q_THC.options().dtype(ComputeType(inputs.q_THC)));
    for (const AttentionPart& part : self_parts) {
      const AttentionOutput rows = PartForward(inputs, part, /*causal=*/true);
      const int64_t size = part.batch * part.q_size;
      result.out_THC.narrow(0, part.q_begin, size).copy_(rows.out_THC);
      result.lse_TH.narrow(0, part.q_begin, size).copy_(rows.lse_TH);
    }
  }
  for (const std::vector<AttentionPart>& level : levels) {
    for (const AttentionPart& part : level) {
      at::Tensor out = result.out_THC.narrow(0, part.q_begin, part.q_size);
      at::Tensor lse = result.lse_TH.narrow(0, part.q_begin, part.q_size);
      MergeByLse(PartForward(inputs, part, /*causal=*/false), out, lse);
    }
  }
  return result;
}

void BackwardByParts(const at::Tensor& dout_THC, const AttentionInputs& inputs,
                     const AttentionOutput& forward,
                     const std::vector<AttentionNode>& nodes,
                     AttentionGradients gradients) {
  // The self parts cover every row once, so they write; the other parts add.
  for (const AttentionPart& part :
       SelfParts(nodes, /*batch_equal_lengths=*/true)) {
    const auto [dq, dk, dv] = PartBackward(dout_THC, inputs, forward, part,
                                           /*causal=*/true);
    const int64_t size = part.batch * part.q_size;
    gradients.dq_THC.narrow(0, part.q_begin, size).copy_(dq);
    gradients.dk_TKC.narrow(0, part.q_begin, size).copy_(dk);
    gradients.dv_TKC.narrow(0, part.q_begin, size).copy_(dv);
  }
  for (const std::vector<AttentionPart>& level : AncestorParts(nodes)) {
    for (const AttentionPart& part : level) {
      const auto [dq, dk, dv] = PartBackward(dout_THC, inputs, forward, part,
                                             /*causal=*/false);
      gradients.dq_THC.narrow(0, part.q_begin, part.q_size).add_(dq);
      gradients.dk_TKC.narrow(0, part.k_begin, part.k_size).add_(dk);
      gradients.dv_TKC.narrow(0, part.k_begin, part.k_size).add_(dv);
    }
  }
}

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

enum class Implementation { kCpuParts, kCudaVarlen, kEager };

// The flash kernels have neither softcap nor window. A window that is as long
// as the batch's longest path has no effect.
Implementation Choose(const AttentionInputs& inputs,
                      const std::vector<AttentionNode>& nodes,
                      AttentionMethod method) {
  const AttentionRule& rule = inputs.rule;
  if (method == AttentionMethod::kEager || rule.softcap > 0 ||
      (rule.window > 0 && LongestPath(nodes) > rule.window)) {
    return Implementation::kEager;
  }
  if (VarlenSupports(inputs.q_THC)) return Implementation::kCudaVarlen;
  // Only the CPU has flash kernels for every dtype.
  return inputs.q_THC.is_cpu() ? Implementation::kCpuParts
                               : Implementation::kEager;
}

}  // namespace

AttentionOutput TreeAttention(const at::Tensor& q_THC, const at::Tensor& k_TKC,
                              const at::Tensor& v_TKC,
                              const std::vector<AttentionNode>& nodes,
                              const AttentionRule& rule,
                              AttentionMethod method) {
  const AttentionInputs inputs{q_THC, k_TKC, v_TKC, rule};
  switch (Choose(inputs, nodes, method)) {
    case Implementation::kCudaVarlen:
      return VarlenTreeAttention(inputs, nodes);
    case Implementation::kEager:
      return EagerTreeAttention(inputs, nodes);
    case Implementation::kCpuParts:
      break;
  }
  return ForwardByParts(inputs, nodes);
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
  BackwardByParts(dout_THC, inputs, forward, nodes, gradients);
}

}  // namespace weft::ops
