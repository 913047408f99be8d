#include "src/ops/suffix_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>

#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

// Returns a view of rows [begin, begin + size) as [1, M, size, C].
at::Tensor OneRun(const at::Tensor& x_TMC, int64_t begin, int64_t size) {
  return x_TMC.narrow(0, begin, size).transpose(0, 1).unsqueeze(0);
}

AttentionOutput FlashPart(const AttentionInputs& inputs,
                          const AttentionPart& part, bool causal) {
  const auto [out_1HQC, lse_1HQ] =
      at::_scaled_dot_product_flash_attention_for_cpu(
          OneRun(inputs.q_THC, part.q_begin, part.q_size),
          OneRun(inputs.k_TKC, part.k_begin, part.k_size),
          OneRun(inputs.v_TKC, part.k_begin, part.k_size), /*dropout_p=*/0.0,
          causal, /*attn_mask=*/{}, inputs.rule.scale);
  return {out_1HQC.squeeze(0).transpose(0, 1).contiguous(),
          lse_1HQ.squeeze(0).t().contiguous()};
}

// The suffix attends to itself and to the tokens before it. This takes two
// calls, because the causal kernel aligns the first query with the first key.
at::Tensor FlashSuffix(const AttentionInputs& inputs, const SuffixRows& rows) {
  const int64_t past = rows.k_size - rows.q_size;
  AttentionOutput own = FlashPart(inputs,
                                  {.q_begin = rows.q_begin,
                                   .q_size = rows.q_size,
                                   .k_begin = rows.k_begin + past,
                                   .k_size = rows.q_size},
                                  /*causal=*/true);
  if (past > 0) {
    MergeByLse(FlashPart(inputs,
                         {.q_begin = rows.q_begin,
                          .q_size = rows.q_size,
                          .k_begin = rows.k_begin,
                          .k_size = past},
                         /*causal=*/false),
               own.out_THC, own.lse_TH);
  }
  return own.out_THC;
}

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
  const bool flash = std::ranges::all_of(
      sequences,
      [&](const SuffixRows& rows) { return FlashExpresses(rule, rows); });
  if (flash && VarlenSupports(q_THC)) {
    return VarlenSuffixAttention(inputs, sequences);
  }
  at::Tensor out_THC = at::empty(q_THC.sizes(), q_THC.options());
  for (const SuffixRows& rows : sequences) {
    at::Tensor out = out_THC.narrow(0, rows.q_begin, rows.q_size);
    if (q_THC.is_cpu() && FlashExpresses(rule, rows)) {
      out.copy_(FlashSuffix(inputs, rows));
    } else {
      EagerSuffixAttention(inputs, rows, out);
    }
  }
  return out_THC;
}

}  // namespace weft::ops
