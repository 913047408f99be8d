// The input of one pass through the layers: the tokens of many sequences of
// many adapters, laid flat, without padding.
//
// Worked example, adapter 7 with sequences of 3 and 2 tokens, adapter 9 with
// one of 2:
//   tokens_T    a b c | d e | f g
//   positions_T 0 1 2 | 0 1 | 0 1
//   nodes       {0,3,-1,3} {3,5,-1,5} {5,7,-1,7}
//   routing     {0,5,adapter 7} {5,7,adapter 9}
#ifndef WEFT_SRC_MODEL_PACKED_BATCH_H_
#define WEFT_SRC_MODEL_PACKED_BATCH_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/lora/lora_linear.h"
#include "src/ops/suffix_attention.h"
#include "src/ops/tree_attention.h"

namespace weft::model {

struct PackedBatch {
  at::Tensor tokens_T;     // [T] i64.
  at::Tensor positions_T;  // [T] i32.
  std::vector<ops::AttentionNode> nodes;
  lora::LoraRouting routing;
  // [T, L K] i16, for L layers with experts and K experts per token: the
  // experts of every row, layer by layer; -1 where the router chooses. If
  // undefined, it chooses everywhere.
  at::Tensor experts_TE;
  // The table of a recorded step, for the layers only; `routing` is then empty.
  // If null, the pass makes a table from `routing`.
  lora::RoutingTablePtr table;
};

// Paged keys and values of every layer. S is the number of tokens in a page.
// The experts that computed a token are kept beside its keys.
struct KvStore {
  std::vector<at::Tensor> k_pages_PSKC;  // One per layer.
  std::vector<at::Tensor> v_pages_PSKC;
  at::Tensor experts_PSE;  // i16; as PackedBatch.experts_TE. Undefined if the
                           // model has no experts.
};

// How an evaluation pass uses the cache. It writes the batch's keys and values
// to slots_T. Prefill attends within the batch (nodes). Prefill with suffixes
// also attends to the cached beginning of each sequence. Decode has one row per
// sequence and attends to the sequence's pages.
//
// Worked example of suffixes, the last 2 of 5 tokens and a whole prompt of 3:
//   suffixes     {0,2,0,5} {2,3,5,3}
//   key_slots_S  the slots of the 5 tokens, then of the 3
struct KvAccess {
  KvStore* store = nullptr;
  at::Tensor slots_T;  // [T] i64.
  // Used only by prefill. Empty if the cache holds no part of any sequence.
  std::vector<ops::SuffixRows> suffixes;
  at::Tensor key_slots_S;  // [S] i64, with suffixes only.
  bool decode = false;
  at::Tensor page_table_TL;  // [T, L] i32, decode only.
  at::Tensor lengths_T;      // [T] i32, decode only; the new token included.
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_PACKED_BATCH_H_
