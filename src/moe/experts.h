// A mixture of experts with LoRA on every expert:
//   y = sum over a token's experts e of w_e down_e(act(gate_e x) * up_e x),
// where gate, up and down may have biases, and, if the model has a shared
// expert, that expert of every token with weight sigmoid(x g).
//
// A weight multiplies the input of `down`, not its output. The product is
// linear but for its bias, which is multiplied apart. So both are equal, and
// the gradient of the weight then needs no output of an expert.
//
// Legend: T tokens, H hidden, F features of an expert, S of the shared expert,
// E experts, K experts per token, P experts that the rank has.
#ifndef WEFT_SRC_MOE_EXPERTS_H_
#define WEFT_SRC_MOE_EXPERTS_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/lora/lora_linear.h"
#include "src/model_config/model_config.h"
#include "src/moe/expert_rows.h"
#include "src/moe/router.h"

namespace weft::moe {

// The frozen weights of one layer's experts. With several ranks, each has its
// features of its experts and the whole router.
struct ExpertWeights {
  at::Tensor router_EH;
  at::Tensor router_bias_E;   // Undefined, as the others, without biases.
  at::Tensor gate_up_GH;      // [P 2F, H], rows gate | up of each.
  at::Tensor gate_up_bias_G;  // [P 2F].
  at::Tensor down_DF;         // [P H, F].
  at::Tensor down_bias_D;  // [P H], on one of the ranks that share an expert.
  at::Tensor shared_gate_up_S2H;  // [2S, H]; undefined without shared expert.
  at::Tensor shared_down_HS;
  at::Tensor shared_gate_1H;
};

// What the functions below read of one layer. `config` and `shape` describe the
// rank's part.
struct ExpertLayer {
  int layer = 0;
  const ExpertWeights& weights;
  const model::ModelConfig& config;
  const lora::ModelShape& shape;
};

// What the forward pass of one expert keeps.
struct PartTape {
  at::Tensor gate_up_n2F;
  lora::ShrunkInputs shrunk_gate_up, shrunk_down;
};

// What a layer keeps for its backward pass.
struct ExpertTape {
  Routing routing;
  ExpertRows rows;
  std::vector<PartTape> parts;
  PartTape shared;
  at::Tensor shared_weight_T1;
};

// Returns y [T, H], with several ranks the part of the sum that this rank has.
// `experts_TK` is undefined or has experts as Route takes them; it is set to
// the experts of all tokens. `tape` may be null.
// Shapes:  x_TH [T, H] contiguous.   Errors:  throws c10::Error.
// Threads: engine thread only.
[[nodiscard]] at::Tensor ForwardExperts(const ExpertLayer& layer,
                                        const at::Tensor& x_TH,
                                        const lora::LoraRouting& routing,
                                        at::Tensor& experts_TK,
                                        ExpertTape* tape);

// Fills the tape of ForwardExperts again, without the last product.
// `experts_TK` has the experts of all tokens.
void RecomputeExperts(const ExpertLayer& layer, const at::Tensor& x_TH,
                      const lora::LoraRouting& routing,
                      const at::Tensor& experts_TK, ExpertTape& tape);

// Returns dLoss/dx [T, H], with several ranks this rank's part of the sum. Adds
// to the gradients of the adapters. Consumes the tape.
[[nodiscard]] at::Tensor BackwardExperts(const ExpertLayer& layer,
                                         const at::Tensor& dy_TH,
                                         const at::Tensor& x_TH,
                                         const lora::LoraRouting& routing,
                                         const lora::LoraGradients& gradients,
                                         ExpertTape& tape);

}  // namespace weft::moe

#endif  // WEFT_SRC_MOE_EXPERTS_H_
