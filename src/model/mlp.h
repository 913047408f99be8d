// The second part of a layer: the MLP, or the experts in its place.
//
// Legend: T packed tokens, H hidden, F feed-forward, K experts per token.
#ifndef WEFT_SRC_MODEL_MLP_H_
#define WEFT_SRC_MODEL_MLP_H_

#include <ATen/core/Tensor.h>

#include "src/model/layer.h"
#include "src/model/residual.h"
#include "src/model/tape.h"
#include "src/moe/experts.h"

namespace weft::model {

// Holds references only. Threads: engine thread.
class Mlp {
 public:
  explicit Mlp(const Layer& layer) : layer_(layer) {}

  // Takes the stream as attention returns it. Returns it with next_norm_H
  // applied, or without a norm if that is undefined. `tape` may be null.
  // `experts_TK` is as for moe::ForwardExperts.
  [[nodiscard]] Stream Forward(Stream mid, const at::Tensor& next_norm_H,
                               const Pass& pass, LayerTape* tape,
                               at::Tensor& experts_TK) const;
  // Fills what the backward pass reads of the tape, which has experts_TK,
  // without the last product if the backward pass does not read that.
  void Recompute(at::Tensor normed_TH, const Pass& pass, LayerTape& tape) const;
  // Adds to d_TH, the gradient of the residual stream.
  void Backward(const BackwardPass& pass, LayerTape& tape,
                at::Tensor& d_TH) const;

 private:
  // Returns the output, summed over ranks.
  [[nodiscard]] at::Tensor Output(at::Tensor normed_TH, const Pass& pass,
                                  LayerTape* tape,
                                  at::Tensor& experts_TK) const;
  [[nodiscard]] at::Tensor GateUp(at::Tensor normed_TH, const Pass& pass,
                                  LayerTape* tape) const;
  [[nodiscard]] at::Tensor Gated(const at::Tensor& gate_up_T2F) const;
  [[nodiscard]] at::Tensor Down(const at::Tensor& gate_up_T2F, const Pass& pass,
                                LayerTape* tape) const;
  // Returns the gradient of normed_TH without experts.
  [[nodiscard]] at::Tensor DenseBackward(const BackwardPass& pass,
                                         LayerTape& tape,
                                         const at::Tensor& dy_TH) const;
  [[nodiscard]] moe::ExpertLayer experts() const;

  const Layer layer_;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_MLP_H_
