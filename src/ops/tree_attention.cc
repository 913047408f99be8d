#include "src/ops/tree_attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "src/ops/cpu_dispatch.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

// Letters here: B runs of a batched part, Q query rows and S key rows of a run.

// Rows [begin, begin + batch * size) as [B, M, size, C]. A view.
at::Tensor Runs(const at::Tensor& x_TMC, int64_t begin, int64_t batch,
                int64_t size) {
  return x_TMC.narrow(0, begin, batch * size)
      .unflatten(0, {batch, size})
      .transpose(1, 2);
}

// The inverse of Runs: [B, M, size, C] to [B * size, M, C].
at::Tensor Rows(const at::Tensor& x_BMSC) {
  return x_BMSC.transpose(1, 2).flatten(0, 1);
}

// Tensors of one part, as views.
struct PartView {
  PartView(const AttentionInputs& inputs, const AttentionPart& part)
      : q_BHQC(Runs(inputs.q_THC, part.q_begin, part.batch, part.q_size)),
        k_BKSC(Runs(inputs.k_TKC, part.k_begin, part.batch, part.k_size)),
        v_BKSC(Runs(inputs.v_TKC, part.k_begin, part.batch, part.k_size)),
        scale(inputs.scale) {}

  at::Tensor q_BHQC;
  at::Tensor k_BKSC;
  at::Tensor v_BKSC;
  double scale;
};

// The backward pass's extra inputs of one part.
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

// Key or value heads, each repeated for its query heads, in the compute type.
at::Tensor RepeatHeads(const at::Tensor& x_BKSC, int64_t num_heads) {
  return x_BKSC.to(ComputeType(x_BKSC))
      .repeat_interleave(num_heads / x_BKSC.size(1), 1);
}

// Scores with -inf where a query may not look.
at::Tensor EagerScores(const PartView& part, bool causal) {
  const at::Tensor k = RepeatHeads(part.k_BKSC, part.q_BHQC.size(1));
  at::Tensor scores =
      at::matmul(part.q_BHQC.to(k.scalar_type()), k.transpose(-1, -2)) *
      part.scale;
  if (causal) {
    const at::Tensor hidden = at::ones({scores.size(-2), scores.size(-1)},
                                       scores.options().dtype(at::kBool))
                                  .triu(1);
    scores.masked_fill_(hidden, -INFINITY);
  }
  return scores;
}

OutAndLse EagerForward(const PartView& part, bool causal) {
  const at::Tensor scores = EagerScores(part, causal);
  const at::Tensor lse = at::logsumexp(scores, -1);
  const at::Tensor weights = (scores - lse.unsqueeze(-1)).exp_();
  const at::Tensor v = RepeatHeads(part.v_BKSC, part.q_BHQC.size(1));
  return {at::matmul(weights, v).to(part.q_BHQC.scalar_type()), lse};
}

Gradients EagerBackward(const PartView& part, const UpstreamView& up,
                        bool causal) {
  const auto type = ComputeType(part.q_BHQC);
  const int64_t num_heads = part.q_BHQC.size(1);
  const int64_t num_kv_heads = part.k_BKSC.size(1);
  const at::Tensor dout = up.dout_BHQC.to(type);
  const at::Tensor weights =
      (EagerScores(part, causal) - up.lse_BHQ.unsqueeze(-1)).exp_();
  const at::Tensor dweights =
      at::matmul(dout, RepeatHeads(part.v_BKSC, num_heads).transpose(-1, -2));
  const at::Tensor delta =
      (dout * up.out_BHQC.to(type)).sum(-1, /*keepdim=*/true);
  const at::Tensor dscores = weights * (dweights - delta) * part.scale;
  const auto sum_group = [&](const at::Tensor& x_BHSC) {
    return x_BHSC.unflatten(1, {num_kv_heads, num_heads / num_kv_heads}).sum(2);
  };
  return {
      at::matmul(dscores, RepeatHeads(part.k_BKSC, num_heads)),
      sum_group(at::matmul(dscores.transpose(-1, -2), part.q_BHQC.to(type))),
      sum_group(at::matmul(weights.transpose(-1, -2), dout))};
}

AttentionOutput PartForward(const AttentionInputs& inputs,
                            const AttentionPart& part, bool causal,
                            AttentionMethod method) {
  const auto forward =
      method == AttentionMethod::kFused ? FlashForward : EagerForward;
  const auto [out_BHQC, lse_BHQ] = forward(PartView(inputs, part), causal);
  return {Rows(out_BHQC), lse_BHQ.transpose(1, 2).flatten(0, 1)};
}

// dq, dk, dv of a part as rows [N, M, C].
Gradients PartBackward(const at::Tensor& dout_THC,
                       const AttentionInputs& inputs,
                       const AttentionOutput& forward,
                       const AttentionPart& part, bool causal,
                       AttentionMethod method) {
  const auto runs = [&](const at::Tensor& x) {
    return Runs(x, part.q_begin, part.batch, part.q_size);
  };
  const UpstreamView up{runs(dout_THC), runs(forward.out_THC),
                        runs(forward.lse_TH)};
  const auto backward =
      method == AttentionMethod::kFused ? FlashBackward : EagerBackward;
  const auto [dq, dk, dv] = backward(PartView(inputs, part), up, causal);
  return {Rows(dq), Rows(dk), Rows(dv)};
}

AttentionOutput ForwardByParts(const AttentionInputs& inputs,
                               const std::vector<AttentionNode>& nodes,
                               AttentionMethod method) {
  const auto self_parts = SelfParts(nodes, /*batch_equal_lengths=*/true);
  const auto levels = AncestorParts(nodes);
  AttentionOutput result;
  if (self_parts.size() == 1) {
    result = PartForward(inputs, self_parts[0], /*causal=*/true, method);
  } else {
    result.out_THC = at::empty(inputs.q_THC.sizes(), inputs.q_THC.options());
    result.lse_TH =
        at::empty({inputs.q_THC.size(0), inputs.q_THC.size(1)},
                  inputs.q_THC.options().dtype(ComputeType(inputs.q_THC)));
    for (const AttentionPart& part : self_parts) {
      const AttentionOutput rows =
          PartForward(inputs, part, /*causal=*/true, method);
      const int64_t size = part.batch * part.q_size;
      result.out_THC.narrow(0, part.q_begin, size).copy_(rows.out_THC);
      result.lse_TH.narrow(0, part.q_begin, size).copy_(rows.lse_TH);
    }
  }
  for (const std::vector<AttentionPart>& level : levels) {
    for (const AttentionPart& part : level) {
      at::Tensor out = result.out_THC.narrow(0, part.q_begin, part.q_size);
      at::Tensor lse = result.lse_TH.narrow(0, part.q_begin, part.q_size);
      MergeByLse(PartForward(inputs, part, /*causal=*/false, method), out, lse);
    }
  }
  return result;
}

void BackwardByParts(const at::Tensor& dout_THC, const AttentionInputs& inputs,
                     const AttentionOutput& forward,
                     const std::vector<AttentionNode>& nodes,
                     AttentionMethod method, AttentionGradients gradients) {
  // Self parts cover every row once, so they write and the others add.
  for (const AttentionPart& part :
       SelfParts(nodes, /*batch_equal_lengths=*/true)) {
    const auto [dq, dk, dv] = PartBackward(dout_THC, inputs, forward, part,
                                           /*causal=*/true, method);
    const int64_t size = part.batch * part.q_size;
    gradients.dq_THC.narrow(0, part.q_begin, size).copy_(dq);
    gradients.dk_TKC.narrow(0, part.q_begin, size).copy_(dk);
    gradients.dv_TKC.narrow(0, part.q_begin, size).copy_(dv);
  }
  for (const std::vector<AttentionPart>& level : AncestorParts(nodes)) {
    for (const AttentionPart& part : level) {
      const auto [dq, dk, dv] = PartBackward(dout_THC, inputs, forward, part,
                                             /*causal=*/false, method);
      gradients.dq_THC.narrow(0, part.q_begin, part.q_size).add_(dq);
      gradients.dk_TKC.narrow(0, part.k_begin, part.k_size).add_(dk);
      gradients.dv_TKC.narrow(0, part.k_begin, part.k_size).add_(dv);
    }
  }
}

// What a call runs on: CUDA's flash kernels are reached elsewhere, and only the
// CPU has them for every dtype.
AttentionMethod PartMethod(const at::Tensor& q_THC, AttentionMethod method) {
  return q_THC.is_cpu() ? method : AttentionMethod::kEager;
}

}  // namespace

AttentionOutput TreeAttention(const at::Tensor& q_THC, const at::Tensor& k_TKC,
                              const at::Tensor& v_TKC,
                              const std::vector<AttentionNode>& nodes,
                              double scale, AttentionMethod method) {
  const AttentionInputs inputs{q_THC, k_TKC, v_TKC, scale};
  if (method == AttentionMethod::kFused && VarlenSupports(q_THC)) {
    return VarlenTreeAttention(inputs, nodes);
  }
  return ForwardByParts(inputs, nodes, PartMethod(q_THC, method));
}

void TreeAttentionBackward(const at::Tensor& dout_THC, const at::Tensor& q_THC,
                           const at::Tensor& k_TKC, const at::Tensor& v_TKC,
                           const AttentionOutput& forward,
                           const std::vector<AttentionNode>& nodes,
                           double scale, at::Tensor& dq_THC, at::Tensor& dk_TKC,
                           at::Tensor& dv_TKC, AttentionMethod method) {
  const AttentionInputs inputs{q_THC, k_TKC, v_TKC, scale};
  const AttentionGradients gradients{dq_THC, dk_TKC, dv_TKC};
  if (method == AttentionMethod::kFused && VarlenSupports(q_THC)) {
    VarlenTreeAttentionBackward(dout_THC, inputs, forward, nodes, gradients);
    return;
  }
  BackwardByParts(dout_THC, inputs, forward, nodes, PartMethod(q_THC, method),
                  gradients);
}

}  // namespace weft::ops
