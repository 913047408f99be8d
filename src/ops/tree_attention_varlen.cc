// Tree and suffix attention on CUDA by LibTorch's variable-length flash
// kernels: one causal call for all nodes or sequences, and one call for each
// level of ancestors.
//
// The code relies on these properties of LibTorch 2.11:
// - Queries and keys are packed [rows, heads, C] with i32 cumulative lengths.
// - The log-sum-exp is unpadded, [heads, rows] f32 (RunForward checks this).
// - Without dropout the random state is not read.
// - A causal call with fewer queries than keys aligns the last query with the
//   last key.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "src/ops/host_copy.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

// The arguments of one variable-length call: the rows of its parts, and where
// each part ends.
struct VarlenCall {
  at::Tensor q_rows;  // Row numbers; undefined means all rows in order.
  at::Tensor k_rows;
  at::Tensor q_ends;  // Cumulative lengths, [parts + 1] i32.
  at::Tensor k_ends;
  // The most query rows of a part, but at least 2: with 1, the kernel would
  // fold query heads into rows and change the layout of the log-sum-exp.
  int64_t max_q = 2;
  int64_t max_k = 1;
};

VarlenCall MakeCall(const std::vector<AttentionPart>& parts, bool all_rows,
                    at::Device device) {
  VarlenCall call;
  std::vector<int64_t> q_rows, k_rows, q_ends = {0}, k_ends = {0};
  for (const AttentionPart& part : parts) {
    for (int64_t i = 0; !all_rows && i < part.q_size; ++i)
      q_rows.push_back(part.q_begin + i);
    for (int64_t i = 0; !all_rows && i < part.k_size; ++i)
      k_rows.push_back(part.k_begin + i);
    q_ends.push_back(q_ends.back() + part.q_size);
    k_ends.push_back(k_ends.back() + part.k_size);
    call.max_q = std::max(call.max_q, part.q_size);
    call.max_k = std::max(call.max_k, part.k_size);
  }
  call.q_ends = ToDevice(q_ends, device, at::kInt);
  call.k_ends =
      k_ends == q_ends ? call.q_ends : ToDevice(k_ends, device, at::kInt);
  if (!all_rows) {
    call.q_rows = ToDevice(q_rows, device);
    call.k_rows = ToDevice(k_rows, device);
  }
  return call;
}

at::Tensor Select(const at::Tensor& x, const at::Tensor& rows) {
  return rows.defined() ? x.index_select(0, rows) : x;
}

AttentionOutput RunForward(const AttentionInputs& inputs,
                           const VarlenCall& call, bool causal) {
  const at::Tensor q = Select(inputs.q_THC, call.q_rows);
  const auto result = at::_flash_attention_forward(
      q, Select(inputs.k_TKC, call.k_rows), Select(inputs.v_TKC, call.k_rows),
      call.q_ends, call.k_ends, call.max_q, call.max_k, /*dropout_p=*/0.0,
      causal, /*return_debug_mask=*/false, inputs.rule.scale);
  const at::Tensor& lse_HN = std::get<1>(result);
  TORCH_CHECK(lse_HN.dim() == 2 && lse_HN.size(0) == q.size(1) &&
                  lse_HN.size(1) == q.size(0),
              "flash attention's log-sum-exp is not [heads, rows] but ",
              lse_HN.sizes());
  // Returns lse as a transposed view, because the backward pass needs [heads,
  // rows] in memory.
  return {std::get<0>(result), lse_HN.t()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> RunBackward(
    const at::Tensor& dout_THC, const AttentionInputs& inputs,
    const AttentionOutput& forward, const VarlenCall& call, bool causal) {
  const at::Tensor unused = at::empty(
      {2},
      at::TensorOptions().dtype(at::kUInt64).device(inputs.q_THC.device()));
  return at::_flash_attention_backward(
      Select(dout_THC, call.q_rows), Select(inputs.q_THC, call.q_rows),
      Select(inputs.k_TKC, call.k_rows), Select(inputs.v_TKC, call.k_rows),
      Select(forward.out_THC, call.q_rows),
      Select(forward.lse_TH, call.q_rows).t().contiguous(), call.q_ends,
      call.k_ends, call.max_q, call.max_k, /*dropout_p=*/0.0, causal,
      /*rng_state=*/unused, unused, inputs.rule.scale);
}

void Keep(const at::Tensor& made, at::Tensor& gradient) {
  if (gradient.defined()) {
    gradient.copy_(made);
  } else {
    gradient = made;
  }
}

}  // namespace

bool VarlenSupports(const at::Tensor& q_THC) {
  return q_THC.is_cuda() && q_THC.size(0) > 0 && q_THC.is_floating_point() &&
         FlashTakes(q_THC.element_size(), q_THC.size(2));
}

bool FlashTakes(int64_t element_bytes, int64_t head_features) {
  constexpr int64_t kHalfBytes = 2;
  return element_bytes == kHalfBytes && head_features % 8 == 0 &&
         head_features <= 256;
}

AttentionOutput VarlenTreeAttention(const AttentionInputs& inputs,
                                    const std::vector<AttentionNode>& nodes) {
  const at::Device device = inputs.q_THC.device();
  const auto self_parts = SelfParts(nodes);
  AttentionOutput result =
      RunForward(inputs, MakeCall(self_parts, /*all_rows=*/true, device),
                 /*causal=*/true);
  for (const std::vector<AttentionPart>& level : AncestorParts(nodes)) {
    if (level.empty()) continue;
    const VarlenCall call = MakeCall(level, /*all_rows=*/false, device);
    at::Tensor out = Select(result.out_THC, call.q_rows);
    at::Tensor lse = Select(result.lse_TH, call.q_rows);
    MergeByLse(RunForward(inputs, call, /*causal=*/false), out, lse);
    result.out_THC.index_copy_(0, call.q_rows, out);
    result.lse_TH.index_copy_(0, call.q_rows, lse);
  }
  return result;
}

AttentionOutput VarlenSuffixAttention(
    const AttentionInputs& inputs, const std::vector<SuffixRows>& sequences) {
  std::vector<AttentionPart> parts;
  for (const SuffixRows& rows : sequences) {
    parts.push_back({.q_begin = rows.q_begin,
                     .q_size = rows.q_size,
                     .k_begin = rows.k_begin,
                     .k_size = rows.k_size});
  }
  return RunForward(inputs,
                    MakeCall(parts, /*all_rows=*/true, inputs.q_THC.device()),
                    /*causal=*/true);
}

void VarlenTreeAttentionBackward(const at::Tensor& dout_THC,
                                 const AttentionInputs& inputs,
                                 const AttentionOutput& forward,
                                 const std::vector<AttentionNode>& nodes,
                                 AttentionGradients gradients) {
  const at::Device device = inputs.q_THC.device();
  const auto self_parts = SelfParts(nodes);
  {
    const auto [dq, dk, dv] = RunBackward(
        dout_THC, inputs, forward,
        MakeCall(self_parts, /*all_rows=*/true, device), /*causal=*/true);
    Keep(dq, gradients.dq_THC);
    Keep(dk, gradients.dk_TKC);
    Keep(dv, gradients.dv_TKC);
  }
  for (const std::vector<AttentionPart>& level : AncestorParts(nodes)) {
    if (level.empty()) continue;
    const VarlenCall call = MakeCall(level, /*all_rows=*/false, device);
    const auto [dq, dk, dv] =
        RunBackward(dout_THC, inputs, forward, call, /*causal=*/false);
    gradients.dq_THC.index_add_(0, call.q_rows, dq);
    gradients.dk_TKC.index_add_(0, call.k_rows, dk);
    gradients.dv_TKC.index_add_(0, call.k_rows, dv);
  }
}

}  // namespace weft::ops
