#include "src/ops/tree_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include "src/ops/blocked_attention.h"
#include "src/ops/check_argument.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/ops/pointwise.h"

namespace weft::ops {
namespace {

// Returns one part for each node that is not empty. In this part, the node's
// rows attend to the node's own rows. The parts cover all rows in order. A part
// is consecutive query rows and consecutive key rows, as SuffixRows has them.
std::vector<SuffixRows> SelfParts(const std::vector<AttentionNode>& nodes) {
  std::vector<SuffixRows> parts;
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

// Returns the parts in which descendants' rows attend to an ancestor's rows,
// one list (maybe empty) for each depth of the ancestor. The parts of one list
// have disjoint query rows.
std::vector<std::vector<SuffixRows>> AncestorParts(
    const std::vector<AttentionNode>& nodes) {
  std::vector<std::vector<SuffixRows>> levels;
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

// Returns uninitialised memory for the output of attention with queries q_THC.
AttentionOutput EmptyOutput(const at::Tensor& q_THC) {
  return {at::empty(q_THC.sizes(), q_THC.options()),
          at::empty({q_THC.size(0), q_THC.size(1)},
                    q_THC.options().dtype(ComputeType(q_THC)))};
}

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

VarlenCall MakeCall(const std::vector<SuffixRows>& parts, bool all_rows,
                    at::Device device) {
  VarlenCall call;
  std::vector<int64_t> q_rows, k_rows, q_ends = {0}, k_ends = {0};
  for (const SuffixRows& part : parts) {
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

// Returns whether the flash kernels take elements and heads of these sizes.
bool FlashTakes(int64_t element_bytes, int64_t head_features) {
  constexpr int64_t kHalfBytes = 2;
  return element_bytes == kHalfBytes && head_features % 8 == 0 &&
         head_features <= 256;
}

// Returns whether the flash kernels take q.
bool VarlenSupports(const at::Tensor& q_THC) {
  return q_THC.is_cuda() && q_THC.size(0) > 0 && q_THC.is_floating_point() &&
         FlashTakes(q_THC.element_size(), q_THC.size(2));
}

AttentionOutput VarlenTreeAttention(const AttentionInputs& inputs,
                                    const std::vector<AttentionNode>& nodes) {
  const at::Device device = inputs.q_THC.device();
  const auto self_parts = SelfParts(nodes);
  AttentionOutput result =
      RunForward(inputs, MakeCall(self_parts, /*all_rows=*/true, device),
                 /*causal=*/true);
  for (const std::vector<SuffixRows>& level : AncestorParts(nodes)) {
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
  for (const std::vector<SuffixRows>& level : AncestorParts(nodes)) {
    if (level.empty()) continue;
    const VarlenCall call = MakeCall(level, /*all_rows=*/false, device);
    const auto [dq, dk, dv] =
        RunBackward(dout_THC, inputs, forward, call, /*causal=*/false);
    gradients.dq_THC.index_add_(0, call.q_rows, dq);
    gradients.dk_TKC.index_add_(0, call.k_rows, dk);
    gradients.dv_TKC.index_add_(0, call.k_rows, dv);
  }
}

// Tree and suffix attention by plain matrix products: AttentionMethod::kEager,
// and what neither the flash kernels nor the CPU's blocks support, such as
// capped scores on CUDA.
//
// The keys that a block of query rows may see are gathered along the block's
// path from the root. So their positions are consecutive, and the mask is one
// band of the score matrix.
//
// Legend: N query rows of a block, S keys of the block, G = H / K query heads
// that share a key/value head, and the letters of tree_attention.h.

// The most query rows of a block: enough for efficient matrix products, and few
// enough for a small score matrix.
constexpr int64_t kBlockRows = 256;

// Returns the rows `rows` of [T, H, C] as [K, G N, C], in the dtype of
// ComputeType. So the query heads that share a key/value head are rows of one
// matrix.
at::Tensor GroupRows(const at::Tensor& x_THC, const RowRange& rows,
                     int64_t num_kv_heads) {
  return x_THC.narrow(0, rows.begin, rows.size)
      .to(ComputeType(x_THC))
      .unflatten(1, {num_kv_heads, -1})
      .permute({1, 2, 0, 3})
      .flatten(1, 2);
}

// Inverts GroupRows: turns [K, G N, C] into [N, H, C].
at::Tensor UngroupRows(const at::Tensor& x_KNC, int64_t num_rows) {
  return x_KNC.unflatten(1, {-1, num_rows}).permute({2, 0, 1, 3}).flatten(1, 2);
}

// Returns the rows `keys` of [T, K, C] as [K, S, C], in the dtype of
// ComputeType.
at::Tensor GatherKeys(const at::Tensor& x_TKC,
                      const std::vector<RowRange>& keys) {
  std::vector<at::Tensor> rows;
  for (const RowRange& range : keys) {
    rows.push_back(x_TKC.narrow(0, range.begin, range.size));
  }
  return at::cat(rows).to(ComputeType(x_TKC)).transpose(0, 1);
}

// Adds [K, S, C], which has the keys in the order of GatherKeys, to the rows
// `keys` of [T, K, C].
void ScatterAddKeys(const at::Tensor& d_KSC, const std::vector<RowRange>& keys,
                    at::Tensor& sum_TKC) {
  int64_t done = 0;
  for (const RowRange& range : keys) {
    sum_TKC.narrow(0, range.begin, range.size)
        .add_(d_KSC.narrow(1, done, range.size).transpose(0, 1));
    done += range.size;
  }
}

// The queries, keys and values of a block, and its scores.
struct ScoredBlock {
  ScoredBlock(const AttentionInputs& inputs, const AttentionBlock& block);

  at::Tensor q_KNC, k_KSC, v_KSC;
  at::Tensor scores_KNS;  // -inf where a query may not see a key.
  at::Tensor slope_KNS;   // Softcap's derivative; undefined without softcap.
};

ScoredBlock::ScoredBlock(const AttentionInputs& inputs,
                         const AttentionBlock& block)
    : q_KNC(GroupRows(inputs.q_THC, block.queries, inputs.k_TKC.size(1))),
      k_KSC(GatherKeys(inputs.k_TKC, block.keys)),
      v_KSC(GatherKeys(inputs.v_TKC, block.keys)) {
  const AttentionRule& rule = inputs.rule;
  scores_KNS = at::matmul(q_KNC, k_KSC.transpose(1, 2)).mul_(rule.scale);
  if (rule.softcap > 0) {
    const at::Tensor tanh = scores_KNS.div_(rule.softcap).tanh_();
    slope_KNS = 1 - tanh.square();
    scores_KNS = tanh.mul_(rule.softcap);
  }
  const int64_t rows = block.queries.size;
  const int64_t before = k_KSC.size(1) - rows;  // Number of keys before the
                                                // first query's own key.
  const at::Tensor all =
      at::ones({rows, k_KSC.size(1)}, scores_KNS.options().dtype(at::kBool));
  at::Tensor hidden = all.triu(before + 1);
  if (rule.window > 0) hidden.logical_or_(all.tril(before - rule.window));
  scores_KNS.unflatten(1, {-1, rows}).masked_fill_(hidden, -INFINITY);
}

// Returns the output and the log-sum-exp of the block's rows.
AttentionOutput RunBlock(const AttentionInputs& inputs,
                         const AttentionBlock& block) {
  const int64_t rows = block.queries.size;
  ScoredBlock scored(inputs, block);
  const at::Tensor lse_KN1 =
      at::logsumexp(scored.scores_KNS, -1, /*keepdim=*/true);
  const at::Tensor weights = scored.scores_KNS.sub_(lse_KN1).exp_();
  return {UngroupRows(at::matmul(weights, scored.v_KSC), rows),
          UngroupRows(lse_KN1, rows).squeeze(-1)};
}

void RunBlocks(const AttentionInputs& inputs,
               const std::vector<AttentionBlock>& blocks,
               AttentionOutput& result) {
  for (const AttentionBlock& block : blocks) {
    const auto [begin, rows] = block.queries;
    const AttentionOutput part = RunBlock(inputs, block);
    result.out_THC.narrow(0, begin, rows).copy_(part.out_THC);
    result.lse_TH.narrow(0, begin, rows).copy_(part.lse_TH);
  }
}

void EagerTreeAttentionBackward(const at::Tensor& dout_THC,
                                const AttentionInputs& inputs,
                                const AttentionOutput& forward,
                                const std::vector<AttentionNode>& nodes,
                                AttentionGradients gradients) {
  const int64_t kv_heads = inputs.k_TKC.size(1);
  // A key may be in many blocks. Its gradient is summed in the dtype of
  // ComputeType, so that it is rounded to the dtype of k only once, at the end.
  const auto options = inputs.k_TKC.options().dtype(ComputeType(inputs.k_TKC));
  at::Tensor dk_TKC = at::zeros(inputs.k_TKC.sizes(), options);
  at::Tensor dv_TKC = at::zeros(inputs.v_TKC.sizes(), options);
  for (const AttentionBlock& block :
       TreeBlocks(nodes, inputs.rule.window, kBlockRows)) {
    const auto [begin, rows] = block.queries;
    const auto grouped = [&](const at::Tensor& x_THC) {
      return GroupRows(x_THC, block.queries, kv_heads);
    };
    ScoredBlock scored(inputs, block);
    const at::Tensor dout = grouped(dout_THC);
    const at::Tensor delta =
        (dout * grouped(forward.out_THC)).sum(-1, /*keepdim=*/true);
    const at::Tensor weights =
        scored.scores_KNS.sub_(grouped(forward.lse_TH.unsqueeze(-1))).exp_();
    at::Tensor dscores = at::matmul(dout, scored.v_KSC.transpose(1, 2))
                             .sub_(delta)
                             .mul_(weights)
                             .mul_(inputs.rule.scale);
    if (scored.slope_KNS.defined()) dscores.mul_(scored.slope_KNS);
    gradients.dq_THC.narrow(0, begin, rows)
        .copy_(UngroupRows(at::matmul(dscores, scored.k_KSC), rows));
    ScatterAddKeys(at::matmul(dscores.transpose(1, 2), scored.q_KNC),
                   block.keys, dk_TKC);
    ScatterAddKeys(at::matmul(weights.transpose(1, 2), dout), block.keys,
                   dv_TKC);
  }
  gradients.dk_TKC.copy_(dk_TKC);
  gradients.dv_TKC.copy_(dv_TKC);
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

enum class Implementation { kCpuBlocks, kCudaVarlen, kEager };

// Returns how to compute rows whose keys are on paths of up to `longest` rows.
// The flash kernels have neither softcap nor window. A window at least as long
// as the longest path hides nothing.
Implementation Choose(const AttentionInputs& inputs, int64_t longest,
                      AttentionMethod method) {
  if (method == AttentionMethod::kEager) return Implementation::kEager;
  if (BlockedSupports(inputs.q_THC)) return Implementation::kCpuBlocks;
  const AttentionRule& rule = inputs.rule;
  const bool plain =
      rule.softcap <= 0 && (rule.window == 0 || longest <= rule.window);
  return plain && VarlenSupports(inputs.q_THC) ? Implementation::kCudaVarlen
                                               : Implementation::kEager;
}

// Returns the most query rows of a block of kCpuBlocks or kEager.
int64_t RowsOfBlock(Implementation implementation,
                    const AttentionInputs& inputs) {
  return implementation == Implementation::kEager ? kBlockRows
                                                  : BlockRows(inputs);
}

// Computes blocks of RowsOfBlock.
AttentionOutput ByBlocks(Implementation implementation,
                         const AttentionInputs& inputs,
                         const std::vector<AttentionBlock>& blocks) {
  AttentionOutput result = EmptyOutput(inputs.q_THC);
  if (implementation == Implementation::kEager) {
    RunBlocks(inputs, blocks, result);
  } else {
    BlockedAttention(inputs, blocks, result);
  }
  return result;
}

}  // namespace

void MergeByLse(const AttentionOutput& part, at::Tensor& out_NHC,
                at::Tensor& lse_NH) {
  const bool is_contiguous = out_NHC.is_contiguous() && lse_NH.is_contiguous();
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(out_NHC) && is_contiguous) {
      return cuda::MergeByLse(part.out_THC, part.lse_TH, out_NHC, lse_NH);
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

void CheckSinks(const at::Tensor& sinks_H, const at::Tensor& q_THC) {
  if (!sinks_H.defined()) return;
  CheckArgument("sinks_H", sinks_H, q_THC, ComputeType(q_THC), {q_THC.size(1)});
}

void AddSinks(const at::Tensor& sinks_H, at::Tensor& out_NHC,
              at::Tensor& lse_NH) {
  if (!sinks_H.defined()) return;
  // share_NH is the part of the softmax that the sink leaves to the keys.
  const at::Tensor share_NH = Sigmoid(lse_NH - sinks_H);
  out_NHC.mul_(share_NH.unsqueeze(-1));
  lse_NH.copy_(at::maximum(lse_NH, sinks_H) +
               Softplus((lse_NH - sinks_H).abs_().neg_()));
}

int64_t ScoreBytes(const AttentionRule& rule, int64_t element_bytes,
                   int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
                   int64_t head_features) {
  const bool slides = rule.window > 0 && num_rows > rule.window;
  if (!slides && rule.softcap <= 0 &&
      FlashTakes(element_bytes, head_features)) {
    return 0;
  }
  const int64_t keys =
      slides ? std::min(num_rows, rule.window + kBlockRows) : num_rows;
  // The backward pass has up to four matrices of the scores' size: the softmax,
  // its gradient, the softcap's slope, and a temporary.
  constexpr int64_t kMatrices = 4;
  constexpr int64_t kFloatBytes = 4;
  // Counts dK and dV of all rows, and K, V, dK and dV of a block's keys.
  const int64_t key_rows = 2 * num_rows + 4 * keys;
  return (kMatrices * num_heads * std::min(num_rows, kBlockRows) * keys +
          key_rows * num_kv_heads * head_features) *
         kFloatBytes;
}

at::Tensor SuffixAttention(const at::Tensor& q_THC, const at::Tensor& k_SKC,
                           const at::Tensor& v_SKC,
                           const std::vector<SuffixRows>& sequences,
                           const AttentionRule& rule,
                           const at::Tensor& sinks_H) {
  CheckSinks(sinks_H, q_THC);
  const AttentionInputs inputs{q_THC, k_SKC, v_SKC, rule};
  int64_t longest = 0;
  for (const SuffixRows& rows : sequences) {
    longest = std::max(longest, rows.k_size);
  }
  const auto implementation = Choose(inputs, longest, AttentionMethod::kFused);
  AttentionOutput result =
      implementation == Implementation::kCudaVarlen
          ? RunForward(inputs,
                       MakeCall(sequences, /*all_rows=*/true, q_THC.device()),
                       /*causal=*/true)
          : ByBlocks(implementation, inputs,
                     SuffixBlocks(sequences, rule.window,
                                  RowsOfBlock(implementation, inputs)));
  AddSinks(sinks_H, result.out_THC, result.lse_TH);
  return result.out_THC;
}

AttentionOutput TreeAttention(const at::Tensor& q_THC, const at::Tensor& k_TKC,
                              const at::Tensor& v_TKC,
                              const std::vector<AttentionNode>& nodes,
                              const AttentionRule& rule, AttentionMethod method,
                              const at::Tensor& sinks_H) {
  CheckSinks(sinks_H, q_THC);
  const AttentionInputs inputs{q_THC, k_TKC, v_TKC, rule};
  const auto implementation = Choose(inputs, LongestPath(nodes), method);
  AttentionOutput result =
      implementation == Implementation::kCudaVarlen
          ? VarlenTreeAttention(inputs, nodes)
          : ByBlocks(implementation, inputs,
                     TreeBlocks(nodes, rule.window,
                                RowsOfBlock(implementation, inputs)));
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
  const Implementation implementation =
      Choose(inputs, LongestPath(nodes), method);
  if (implementation == Implementation::kCudaVarlen) {
    return VarlenTreeAttentionBackward(dout_THC, inputs, forward, nodes,
                                       gradients);
  }
  const auto allocate = [](const at::Tensor& like, at::Tensor& gradient) {
    if (!gradient.defined()) gradient = at::empty(like.sizes(), like.options());
  };
  allocate(q_THC, dq_THC);
  allocate(k_TKC, dk_TKC);
  allocate(v_TKC, dv_TKC);
  if (implementation == Implementation::kEager) {
    return EagerTreeAttentionBackward(dout_THC, inputs, forward, nodes,
                                      gradients);
  }
  BlockedAttentionBackward(dout_THC, inputs, forward,
                           TreeBlocks(nodes, rule.window, BlockRows(inputs)),
                           gradients);
}

}  // namespace weft::ops
