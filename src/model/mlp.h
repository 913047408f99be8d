// The second part of a layer: the MLP, or the experts that replace it.
//
// Legend: T packed tokens, H hidden, F feed-forward, K experts per token.
#ifndef WEFT_SRC_MODEL_MLP_H_
#define WEFT_SRC_MODEL_MLP_H_

#include <ATen/core/Tensor.h>

#include "src/model/experts.h"
#include "src/model/layer.h"
#include "src/model/residual.h"
#include "src/model/tape.h"

namespace weft::model {

// Computes the second part of one layer. The references in `layer` outlive the
// object. Threads: engine thread.
class Mlp {
 public:
  explicit Mlp(const Layer& layer) : layer_(layer) {}

  // `mid` is the stream that Attention::Forward returns. Returns the stream
  // after the MLP, with the norm next_norm_H, or without a norm if next_norm_H
  // is undefined. `tape` may be null. `experts_TK` is as for
  // moe::ForwardExperts.
  [[nodiscard]] Stream Forward(Stream mid, const at::Tensor& next_norm_H,
                               const Pass& pass, LayerTape* tape,
                               at::Tensor& experts_TK) const;
  // Fills the tape for Backward. The caller has set tape.x_mid_TH and, in a
  // layer with experts, tape.experts_TK. Computes the output of the MLP only if
  // Backward reads it.
  void Recompute(at::Tensor normed_TH, const Pass& pass, LayerTape& tape) const;
  // Replaces d_TH, the gradient of the residual stream after the MLP, by the
  // gradient of the stream before the MLP. Adds to pass.gradients.
  void Backward(const BackwardPass& pass, LayerTape& tape,
                at::Tensor& d_TH) const;

 private:
  // Returns the output of the MLP, summed over ranks.
  [[nodiscard]] at::Tensor Output(at::Tensor normed_TH, const Pass& pass,
                                  LayerTape* tape,
                                  at::Tensor& experts_TK) const;
  [[nodiscard]] at::Tensor GateUp(at::Tensor normed_TH, const Pass& pass,
                                  LayerTape* tape) const;
  [[nodiscard]] at::Tensor Gated(const at::Tensor& gate_up_T2F) const;
  [[nodiscard]] at::Tensor Down(const at::Tensor& gate_up_T2F, const Pass& pass,
                                LayerTape* tape) const;
  // Returns the gradient of normed_TH in a layer without experts, before the
  // sum over ranks.
  [[nodiscard]] at::Tensor DenseBackward(const BackwardPass& pass,
                                         LayerTape& tape,
                                         const at::Tensor& dy_TH) const;
  [[nodiscard]] moe::ExpertLayer experts() const;

  const Layer layer_;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_MLP_H_
