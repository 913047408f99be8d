// Causal attention over a packed batch of prefix trees, or of the last tokens
// of sequences (SuffixAttention).
//
// Legend: T packed tokens, H query heads, K key/value heads (H % K == 0), C
// head features.
//
// A node is a run of rows. Its rows attend to the node itself causally, and to
// every ancestor in full, except for keys that a window hides. An ordinary
// sequence is a tree of one node. A root begins at position 0, and a child
// begins at the position where its parent ends.
//
// On a CPU, a block of rows reads the keys on its path (blocked_attention.h).
// On CUDA, the flash kernels compute the attention in parts. A part is the
// attention of consecutive query rows to consecutive key rows. Nodes are in
// depth-first order, so the descendants of a node are the rows [end,
// subtree_end). The attention of these rows to the node is one part. The parts
// of a row are merged by log-sum-exp.
//
// Worked example: a prompt of 3 tokens with two completions of 2 and 1 tokens.
// `nodes` has the fields of AttentionNode in order.
//
//   rows   0 1 2 | 3 4 | 5        nodes {0,3,-1,6} {3,5,0,5} {5,6,0,6}
#ifndef WEFT_SRC_OPS_TREE_ATTENTION_H_
#define WEFT_SRC_OPS_TREE_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/ops/attention_rule.h"

namespace weft::ops {

struct AttentionNode {
  int64_t begin = 0;        // First row.
  int64_t end = 0;          // One past the node's last row.
  int64_t parent = -1;      // Index of the parent; -1 for a root.
  int64_t subtree_end = 0;  // One past the last row of the node's subtree.
};

struct AttentionOutput {
  at::Tensor out_THC;  // [T, H, C], in the dtype of q.
  at::Tensor lse_TH;   // [T, H], log-sum-exp; f64 for f64, otherwise f32. It
                       // includes the sink.
};

// kEager computes plain matrix products on any device, with a mask and with
// copies of keys. It needs memory for the scores of 256 rows at a time. kFused
// computes f32 and f64 on a CPU in blocks, for every AttentionRule. On CUDA,
// kFused uses LibTorch's flash kernels under these conditions: f16 or bf16, C a
// multiple of 8 and at most 256, no softcap, and no window that hides part of a
// path. In all other cases kFused does the same as kEager.
enum class AttentionMethod { kFused, kEager };

// Returns the attention of all rows. A sink is one more logit in the softmax of
// its head. It has no value vector.
// Shapes:  q_THC [T, H, C]; k_TKC, v_TKC [T, K, C]; unit stride in C, any other
//          strides, so views into a fused projection are fine. nodes cover rows
//          [0, T) in depth-first order. sinks_H [H], in the dtype of lse_TH, or
//          undefined.
// Errors:  throws c10::Error.
// Threads: engine thread only.
// Source:  Dao 2023 (flash); Liu et al. 2023 (merge, ring attention).
AttentionOutput TreeAttention(const at::Tensor& q_THC, const at::Tensor& k_TKC,
                              const at::Tensor& v_TKC,
                              const std::vector<AttentionNode>& nodes,
                              const AttentionRule& rule,
                              AttentionMethod method = AttentionMethod::kFused,
                              const at::Tensor& sinks_H = {});

// Writes the gradients of q, k and v. `forward` has the output and log-sum-exp
// of TreeAttention, which include the sinks. Sinks get no gradient.
// Shapes: dout like out; dq, dk, dv like q, k, v. The gradients may be views
// but may not alias q, k, v; their old content is overwritten. An undefined
// gradient becomes a new tensor, which saves the CUDA flash kernels a copy.
void TreeAttentionBackward(const at::Tensor& dout_THC, const at::Tensor& q_THC,
                           const at::Tensor& k_TKC, const at::Tensor& v_TKC,
                           const AttentionOutput& forward,
                           const std::vector<AttentionNode>& nodes,
                           const AttentionRule& rule, at::Tensor& dq_THC,
                           at::Tensor& dk_TKC, at::Tensor& dv_TKC,
                           AttentionMethod method = AttentionMethod::kFused);

// Returns the most bytes that kFused takes on CUDA beside its inputs and
// outputs, for up to `num_rows` rows. Returns 0 if the flash kernels compute
// the attention. Otherwise kFused does the same as kEager: it takes scores in
// f32 and, in the backward pass, copies of keys and values and sums of their
// gradients. On a CPU, kFused takes BlockedBackwardBytes instead.
int64_t ScoreBytes(const AttentionRule& rule, int64_t element_bytes,
                   int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
                   int64_t head_features);

// One sequence: the queries of its last q_size tokens and the keys of all its
// k_size tokens. 1 <= q_size <= k_size.
struct SuffixRows {
  int64_t q_begin = 0;
  int64_t q_size = 0;
  int64_t k_begin = 0;
  int64_t k_size = 0;
};

// Returns the causal attention of the last tokens of each sequence over all its
// tokens, [T, H, C] in the dtype of q. The keys and values of the first tokens
// come from a cache, so there are S key rows for T query rows. Query i of a
// sequence sees the sequence's keys 0 to k_size - q_size + i; with a window,
// only the last `window` of these. `sequences` cover the query rows and the key
// rows in order. A sink is one more logit in the softmax of its head, without a
// value.
// Shapes:  q_THC [T, H, C]; k_SKC, v_SKC [S, K, C]; unit stride in C; sinks_H
//          as for TreeAttention.
// Errors:  throws c10::Error.
// Threads: engine thread only.
at::Tensor SuffixAttention(const at::Tensor& q_THC, const at::Tensor& k_SKC,
                           const at::Tensor& v_SKC,
                           const std::vector<SuffixRows>& sequences,
                           const AttentionRule& rule,
                           const at::Tensor& sinks_H = {});

// Merges `part` into `out` and `lse`, which are the attention of the same query
// rows over other keys. Shapes: out [N, H, C], lse [N, H].
void MergeByLse(const AttentionOutput& part, at::Tensor& out_NHC,
                at::Tensor& lse_NH);

// Throws c10::Error if the sinks are defined but do not fit q_THC.
void CheckSinks(const at::Tensor& sinks_H, const at::Tensor& q_THC);

// Adds exp(sink) to the sum of each head's softmax, which shrinks `out` and
// raises `lse`. Does nothing if the sinks are undefined. Shapes: sinks [H], out
// [N, H, C], lse [N, H].
void AddSinks(const at::Tensor& sinks_H, at::Tensor& out_NHC,
              at::Tensor& lse_NH);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_TREE_ATTENTION_H_
