#include "src/ops/suffix_attention.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "src/ops/blocked_attention.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

// The flash kernels have neither softcap nor window.
bool FlashExpresses(const AttentionRule& rule, const SuffixRows& rows) {
  return rule.softcap <= 0 && (rule.window == 0 || rows.k_size <= rule.window);
}

}  // namespace

at::Tensor SuffixAttention(const at::Tensor& q_THC, const at::Tensor& k_SKC,
                           const at::Tensor& v_SKC,
                           const std::vector<SuffixRows>& sequences,
                           const AttentionRule& rule) {
  const AttentionInputs inputs{q_THC, k_SKC, v_SKC, rule};
  AttentionOutput result{at::empty(q_THC.sizes(), q_THC.options()), {}};
  if (BlockedSupports(q_THC)) {
    BlockedAttention(inputs,
                     SuffixBlocks(sequences, rule.window, BlockRows(inputs)),
                     result);
    return result.out_THC;
  }
  const bool flash = std::ranges::all_of(
      sequences,
      [&](const SuffixRows& rows) { return FlashExpresses(rule, rows); });
  if (flash && VarlenSupports(q_THC)) {
    return VarlenSuffixAttention(inputs, sequences);
  }
  EagerSuffixAttention(inputs, sequences, result.out_THC);
  return result.out_THC;
}

}  // namespace weft::ops
