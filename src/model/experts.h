// A mixture of experts with LoRA on every expert. Over a token's experts e,
//   y = sum of w_e down_e(gated(gate_e x, up_e x)),
// where gate, up and down may have biases, and ops/gated_product.h computes
// gated(). If the model has a shared expert, every token also has that expert,
// with the weight sigmoid(x g), where g is shared_gate_1H, or 1 without g.
//
// The weight w_e multiplies the input of `down` and not its output. The result
// is the same, because the product is linear and the weight multiplies the bias
// of `down` separately. So the gradient of the weight needs no expert's output.
//
// On a CPU a thread computes whole experts, if there are enough of them. On
// CUDA in bf16 the routed experts are computed at once (ExpertMlp). In other
// dtypes one expert follows another. The shared expert's LoRA uses the table of
// the pass, because the expert has the rows of the batch.
//
// If grouped products compute the experts, the device sorts the rows of a
// decode pass by expert (SortsOnDevice). Then the host does not wait, and a
// CUDA graph can record the pass.
//
// Legend: T tokens, H hidden, F features of an expert, S of the shared expert,
// E experts, K experts per token, P experts that the rank has, n rows of an
// expert, G = 2 P F, D = P H.
#ifndef WEFT_SRC_MODEL_EXPERTS_H_
#define WEFT_SRC_MODEL_EXPERTS_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/lora/lora_linear.h"
#include "src/model/router.h"
#include "src/model_config/model_config.h"

namespace weft::model {

// The frozen weights of one layer's experts. Every rank has the whole router
// and shared gate, and its own features of its own experts.
struct ExpertWeights {
  at::Tensor router_EH;
  at::Tensor router_bias_E;        // Missing biases are undefined tensors.
  at::Tensor router_correction_E;  // f32; only of a sigmoid router.
  at::Tensor gate_up_GH;           // [P 2F, H]: for each expert gate | up.
  at::Tensor gate_up_bias_G;       // [P 2F].
  at::Tensor down_DF;              // [P H, F].
  at::Tensor down_bias_D;  // [P H]. Only one of an expert's ranks has it.
  // The tensors of the shared expert are undefined if there is none, and the
  // gate also if the expert's weight is 1.
  at::Tensor shared_gate_up_S2H;  // [2S, H].
  at::Tensor shared_down_HS;
  at::Tensor shared_gate_1H;
};

// Describes a layer to the functions below. `config` and `shape` are those of
// the rank's part.
struct ExpertLayer {
  int layer = 0;
  const ExpertWeights& weights;
  const model_config::ModelConfig& config;
  const model_config::ModelShape& shape;
};

// The tensors that the forward pass of one expert, or of all experts at once,
// keeps for the backward pass.
struct PartTape {
  at::Tensor gate_up_n2F;
  lora::ShrunkInputs shrunk_gate_up, shrunk_down;
};

// The tensors that a layer of experts keeps for its backward pass.
struct ExpertTape {
  Routing routing;
  ExpertRows rows;
  // One tape for each of rows.parts, or a single tape for all of them.
  std::vector<PartTape> parts;
  PartTape shared;
  at::Tensor shared_weight_T1;
};

// Returns whether the device can sort the layer's rows by expert while the host
// goes on: if grouped products compute the layer (ops::TakesGroupedProduct),
// and the rank has all experts. ForwardExperts does so if it gets no tape and
// no experts, and the device finds the adapters of the rows
// (lora::FindsExpertRows), as in decode passes.
bool SortsOnDevice(const ExpertLayer& layer);

// Returns y [T, H]. With several ranks, it is this rank's part of a sum over
// ranks. On entry, `experts_TK` is undefined or gives experts, as `given_TK` of
// Route does. On return, it has the experts of all tokens. `tape` may be null.
// Shapes:  x_TH [T, H] contiguous.   Errors:  throws c10::Error.
// Threads: engine thread only.
at::Tensor ForwardExperts(const ExpertLayer& layer, const at::Tensor& x_TH,
                          const lora::LoraPass& pass, at::Tensor& experts_TK,
                          ExpertTape* tape);

// Fills the tape as ForwardExperts does, but skips the product by `down`.
// `experts_TK` has the experts of all tokens.
void RecomputeExperts(const ExpertLayer& layer, const at::Tensor& x_TH,
                      const lora::LoraPass& pass, const at::Tensor& experts_TK,
                      ExpertTape& tape);

// Returns dLoss/dx [T, H]. With several ranks, it is this rank's part of a sum
// over ranks. Adds to `gradients`. Consumes the tape.
at::Tensor BackwardExperts(const ExpertLayer& layer, const at::Tensor& dy_TH,
                           const at::Tensor& x_TH, const lora::LoraPass& pass,
                           const lora::LoraGradients& gradients,
                           ExpertTape& tape);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_EXPERTS_H_
