// Attention of one new token per sequence over its paged keys and values.
// Legend: B sequences, H query heads, K key/value heads, C head features, P
// pages, S tokens per page, L table entries per sequence.
#ifndef WEFT_SRC_OPS_PAGED_ATTENTION_H_
#define WEFT_SRC_OPS_PAGED_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include "src/ops/attention_rule.h"

namespace weft::ops {

// Writes row t of k and v to slot slots[t], which is row slots[t] % S of page
// slots[t] / S. Slots >= 0 are distinct. On a CPU, skips a token whose slot is
// negative; on CUDA, no slot may be negative. PrepareHeads (rotary.h) calls
// this function if no CUDA kernel writes the pages.
// Shapes:  k_TKC, v_TKC [T, K, C], unit stride in C; slots_T [T] i64
//          contiguous, on the device; k_pages, v_pages [P, S, K, C] contiguous.
// Threads: engine thread only.
void WriteKvPages(const at::Tensor& k_TKC, const at::Tensor& v_TKC,
                  const at::Tensor& slots_T, at::Tensor& k_pages_PSKC,
                  at::Tensor& v_pages_PSKC);

// Computes out[b] = softmax(softcap(scale * q[b] . k)) v over the first
// lengths[b] tokens of sequence b. If there is a window, only the last `window`
// of these tokens count. The sequence's pages are page_table[b]. A sequence of
// 0 tokens, which is padding, gets zeros. Table entries of pages without
// visible tokens are ignored. If there are sinks, exp(sinks[h]) is added to the
// sum of head h's softmax.
// Shapes:  q_BHC, out_BHC [B, H, C] (out contiguous); page_table_BL [B, L] i32;
//          lengths_B [B] i32, all on the device; sinks_H [H] f32 (f64 if q is
//          f64), or undefined; all other tensors have one dtype.
// Errors:  throws c10::Error, which names the argument.
void PagedAttention(const at::Tensor& q_BHC, const at::Tensor& k_pages_PSKC,
                    const at::Tensor& v_pages_PSKC,
                    const at::Tensor& page_table_BL,
                    const at::Tensor& lengths_B, const AttentionRule& rule,
                    at::Tensor& out_BHC, const at::Tensor& sinks_H = {});

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_PAGED_ATTENTION_H_
