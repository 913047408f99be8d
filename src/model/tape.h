// The tensors that a training forward pass keeps for its backward pass.
//
// Legend: T packed tokens, H hidden, F feed-forward, K experts per token, W the
// fused width of the query, key and value heads.
#ifndef WEFT_SRC_MODEL_TAPE_H_
#define WEFT_SRC_MODEL_TAPE_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/lora/lora_linear.h"
#include "src/model/experts.h"
#include "src/ops/tree_attention.h"

namespace weft::model {

// The mode of a forward pass. kTrain fills a tape and does not use the cache.
// kEval keeps no tape and may use the cache.
enum class Mode { kTrain, kEval };

// The tensors that one layer keeps for its backward pass. A recomputed layer
// keeps only x_in_TH and, if it has experts, experts_TK. Recomputation uses
// experts_TK, so that a token has the same experts again even if its hidden
// state is rounded differently.
struct LayerTape {
  at::Tensor x_in_TH;
  at::Tensor qkv_TW;     // After rotary.
  at::Tensor qk_raw_TW;  // q and k before the norms; only with qk_norm.
  ops::AttentionOutput attention;
  at::Tensor x_mid_TH;  // Residual stream after attention.
  at::Tensor gate_up_T2F;
  at::Tensor experts_TK;  // The experts of every token.
  moe::ExpertTape experts;
  // The outputs of attention and MLP before their output norms, if the model
  // has output norms.
  at::Tensor attention_raw_TH, mlp_raw_TH;
  lora::ShrunkInputs shrunk_qkv, shrunk_o, shrunk_gate_up, shrunk_down;
};

struct Tape {
  std::vector<LayerTape> layers;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_TAPE_H_
