#include "src/ops/suffix_attention.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "src/ops/blocked_attention.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

// Returns whether the flash kernels, which have neither softcap nor window, can
// compute a sequence. A window at least as long as the sequence hides nothing.
bool FlashExpresses(const AttentionRule& rule, const SuffixRows& rows) {
  return rule.softcap <= 0 && (rule.window == 0 || rows.k_size <= rule.window);
}

AttentionOutput WithoutSinks(const AttentionInputs& inputs,
                             const std::vector<SuffixRows>& sequences) {
  const at::Tensor& q = inputs.q_THC;
  const AttentionRule& rule = inputs.rule;
  const bool flash = std::ranges::all_of(
      sequences,
      [&](const SuffixRows& rows) { return FlashExpresses(rule, rows); });
  if (flash && VarlenSupports(q)) {
    return VarlenSuffixAttention(inputs, sequences);
  }
  AttentionOutput result = EmptyOutput(q);
  if (BlockedSupports(q)) {
    BlockedAttention(inputs,
                     SuffixBlocks(sequences, rule.window, BlockRows(inputs)),
                     result);
  } else {
    EagerSuffixAttention(inputs, sequences, result);
  }
  return result;
}

}  // namespace

at::Tensor SuffixAttention(const at::Tensor& q_THC, const at::Tensor& k_SKC,
                           const at::Tensor& v_SKC,
                           const std::vector<SuffixRows>& sequences,
                           const AttentionRule& rule,
                           const at::Tensor& sinks_H) {
  CheckSinks(sinks_H, q_THC);
  AttentionOutput result = WithoutSinks({q_THC, k_SKC, v_SKC, rule}, sequences);
  AddSinks(sinks_H, result.out_THC, result.lse_TH);
  return result.out_THC;
}

}  // namespace weft::ops
