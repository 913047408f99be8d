// Causal attention of the last tokens of each sequence over all its tokens. The
// keys and values of the first tokens come from a cache.
//
// Legend: T query rows, S key rows, H query heads, K key/value heads (H % K ==
// 0), C head features.
#ifndef WEFT_SRC_OPS_SUFFIX_ATTENTION_H_
#define WEFT_SRC_OPS_SUFFIX_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/ops/attention_rule.h"

namespace weft::ops {

// One sequence: the queries of its last q_size tokens and the keys of all its
// k_size tokens. 1 <= q_size <= k_size.
struct SuffixRows {
  int64_t q_begin = 0;
  int64_t q_size = 0;
  int64_t k_begin = 0;
  int64_t k_size = 0;
};

// Returns the attention of all query rows, [T, H, C] in the dtype of q. Query i
// of a sequence sees the sequence's keys 0 to k_size - q_size + i; with a
// window, only the last `window` of these. `sequences` cover the query rows and
// the key rows in order. A sink is one more logit in the softmax of its head,
// without a value.
// Shapes:  q_THC [T, H, C]; k_SKC, v_SKC [S, K, C]; unit stride in C; sinks_H
//          as for TreeAttention.
// Errors:  throws c10::Error.
// Threads: engine thread only.
[[nodiscard]] at::Tensor SuffixAttention(
    const at::Tensor& q_THC, const at::Tensor& k_SKC, const at::Tensor& v_SKC,
    const std::vector<SuffixRows>& sequences, const AttentionRule& rule,
    const at::Tensor& sinks_H = {});

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_SUFFIX_ATTENTION_H_
