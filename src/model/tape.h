// The tensors that a training forward pass keeps for its backward pass.
//
// Legend: T packed tokens, H hidden, W the fused width (Q + 2K) C of query and
// key/value heads, F feed-forward.
#ifndef WEFT_SRC_MODEL_TAPE_H_
#define WEFT_SRC_MODEL_TAPE_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/lora/lora_linear.h"
#include "src/moe/experts.h"
#include "src/ops/tree_attention.h"

namespace weft::model {

// How a forward pass runs. kTrain keeps a tape and never touches the cache.
// kEval keeps nothing and may use the cache.
enum class Mode { kTrain, kEval };

// What one layer keeps for its backward pass. A recomputed (checkpointed) layer
// keeps only x_in_TH and, in a layer of experts, experts_TK: a token must not
// change its experts because its hidden state is rounded in another way.
struct LayerTape {
  at::Tensor x_in_TH;
  at::Tensor qkv_TW;     // [T, (Q + 2K) C] after rotary.
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
