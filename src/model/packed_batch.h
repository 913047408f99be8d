// The input of one pass through the layers: the tokens of many sequences of
// many adapters, one after another, without padding.
//
// Example: adapter 7 has sequences of 3 and 2 tokens, and adapter 9 has one
// sequence of 2 tokens.
//   tokens_T    a b c | d e | f g
//   positions_T 0 1 2 | 0 1 | 0 1
//   nodes       {0,3,-1,3} {3,5,-1,5} {5,7,-1,7}  (ops::AttentionNode)
//   routing     {0,5,adapter 7} {5,7,adapter 9}
#ifndef WEFT_SRC_MODEL_PACKED_BATCH_H_
#define WEFT_SRC_MODEL_PACKED_BATCH_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/lora/lora_linear.h"
#include "src/ops/tree_attention.h"

namespace weft::model {

struct PackedBatch {
  at::Tensor tokens_T;     // [T] i64.
  at::Tensor positions_T;  // [T] i32.
  std::vector<ops::AttentionNode> nodes;
  lora::LoraRouting routing;
  // The experts of every row, layer by layer: [T, L K] i16, for L layers with
  // experts and K experts per token. At an entry of -1 the router chooses. If
  // the tensor is undefined, the router chooses everywhere.
  at::Tensor experts_TE;
  // Set if a CUDA graph records the decode step and the step has adapters.
  // `routing` is then empty. If null, the pass makes a table from `routing`.
  lora::RoutingTablePtr table;
};

// The cache: pages of keys and values for every attention layer, states for
// every layer of the gated delta rule, and the experts that computed each
// token. P counts pages, S the tokens of a page, K key/value heads, C head
// features; N state slots, R the convolution's size - 1, W its features, H
// value heads, K x V a head's state.
struct KvStore {
  // One per layer, undefined for the layers of the other kind. A state is that
  // after the last token which a pass read; a new sequence's is zero.
  std::vector<at::Tensor> k_pages_PSKC;
  std::vector<at::Tensor> v_pages_PSKC;
  std::vector<at::Tensor> conv_NRW;    // The last rows before the convolution.
  std::vector<at::Tensor> delta_NHKV;  // f32.
  int64_t page_tokens = 0;             // S.
  at::Tensor experts_PSE;  // i16, with the columns of PackedBatch.experts_TE.
                           // Undefined if the model has no experts.
  // The memory of the above, of which the layers are views: tensors [L, P, S,
  // ...] and [L, N, ...] of the L layers that have the part. So a page or a
  // state is copied in all layers at once. LibTorch takes a launch for every 2
  // GiB over which a part's copies are spread.
  std::vector<at::Tensor> pages;
  std::vector<at::Tensor> states;
};

// Describes how an evaluation pass uses the cache. The pass writes the batch's
// keys and values to slots_T. A prefill attends within the batch (`nodes`). A
// prefill with suffixes also attends to the cached beginning of each sequence.
// A decode pass has one row for each sequence and attends to the sequence's
// pages.
//
// Example of suffixes: the last 2 of 5 tokens, and a whole prompt of 3 tokens.
//   suffixes     {0,2,0,5} {2,3,5,3}  (ops::SuffixRows: first row, number of
//                rows, first key, number of keys)
//   key_slots_S  the slots of the 5 tokens, then of the 3
struct KvAccess {
  KvStore* store = nullptr;
  at::Tensor slots_T;  // [T] i64.
  // Only a prefill has suffixes. Empty if the cache has no part of any
  // sequence.
  std::vector<ops::SuffixRows> suffixes;
  at::Tensor key_slots_S;  // [S] i64, for S keys; only with suffixes.
  bool decode = false;
  at::Tensor page_table_TL;  // [T, L] i32 for up to L pages of each sequence,
                             // decode only.
  at::Tensor lengths_T;      // [T] i32, decode only: the tokens of each
                             // sequence, with the new token.
  // The slots of the states: of each sequence of a prefill, in the order of
  // its nodes or suffixes, or of each row of a decode pass. The pass starts
  // from these states and replaces them. If the pass throws, the states have no
  // meaning. Undefined if the model has no layers of the gated delta rule.
  at::Tensor state_slots_Q;  // [Q] i64.
  // The slot that rows without a sequence share, which fill up a CUDA graph.
  // Its state has no meaning. -1: there are no such rows.
  int64_t padding_state = -1;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_PACKED_BATCH_H_
