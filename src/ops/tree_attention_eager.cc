// Tree and suffix attention by plain matrix products. This file implements
// AttentionMethod::kEager. It also computes what neither the flash kernels nor
// the CPU's blocks support, such as capped scores on CUDA.
//
// The keys that a block of query rows may see are gathered along the block's
// path from the root. So their positions are consecutive, and the mask is one
// band of the score matrix.
//
// Legend: N query rows of a block, S keys of the block, G = H / K query heads
// that share a key/value head, and the letters of tree_attention.h.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "src/ops/attention_blocks.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

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

}  // namespace

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

AttentionOutput EagerTreeAttention(const AttentionInputs& inputs,
                                   const std::vector<AttentionNode>& nodes) {
  AttentionOutput result = EmptyOutput(inputs.q_THC);
  RunBlocks(inputs, TreeBlocks(nodes, inputs.rule.window, kBlockRows), result);
  return result;
}

void EagerSuffixAttention(const AttentionInputs& inputs,
                          const std::vector<SuffixRows>& sequences,
                          AttentionOutput& result) {
  RunBlocks(inputs, SuffixBlocks(sequences, inputs.rule.window, kBlockRows),
            result);
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

}  // namespace weft::ops
