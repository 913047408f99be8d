#include "src/model/mlp.h"

#include <ATen/ATen.h>

#include <utility>

#include "src/ops/gated_product.h"
#include "src/ops/rms_norm.h"

namespace weft::model {

using lora::LoraLinear;
using lora::LoraLinearBackward;
using lora::ProjectionGroup;

moe::ExpertLayer Mlp::experts() const {
  return {.layer = layer_.index,
          .weights = layer_.weights.experts,
          .config = layer_.config,
          .shape = layer_.shape};
}

Stream Mlp::Forward(Stream mid, const at::Tensor& next_norm_H, const Pass& pass,
                    LayerTape* tape, at::Tensor& experts_TK) const {
  Stream out = AddOutput(
      mid.x_TH, Output(std::move(mid.normed_TH), pass, tape, experts_TK),
      layer_.weights.mlp_out_norm_H, next_norm_H, layer_.config.rms_norm_eps,
      tape != nullptr ? &tape->mlp_raw_TH : nullptr);
  if (tape != nullptr) tape->x_mid_TH = std::move(mid.x_TH);
  return out;
}

at::Tensor Mlp::Output(at::Tensor normed_TH, const Pass& pass, LayerTape* tape,
                       at::Tensor& experts_TK) const {
  if (layer_.has_experts()) {
    at::Tensor y_TH =
        moe::ForwardExperts(experts(), normed_TH, pass.lora.routing, experts_TK,
                            tape != nullptr ? &tape->experts : nullptr);
    SumOverRanks(layer_.tensor_group, y_TH);
    return y_TH;
  }
  at::Tensor gate_up_T2F = GateUp(std::move(normed_TH), pass, tape);
  at::Tensor y_TH = Down(gate_up_T2F, pass, tape);
  if (tape != nullptr) tape->gate_up_T2F = std::move(gate_up_T2F);
  return y_TH;
}

at::Tensor Mlp::GateUp(at::Tensor normed_TH, const Pass& pass,
                       LayerTape* tape) const {
  return LoraLinear(normed_TH, layer_.weights.gate_up, pass.lora,
                    {layer_.index, ProjectionGroup::kGateUp},
                    tape != nullptr ? &tape->shrunk_gate_up : nullptr);
}

at::Tensor Mlp::Gated(const at::Tensor& gate_up_T2F) const {
  at::Tensor product_TF =
      at::empty({gate_up_T2F.size(0), layer_.shape.ffn}, gate_up_T2F.options());
  ops::GatedProduct(layer_.config.activation, gate_up_T2F, product_TF);
  return product_TF;
}

at::Tensor Mlp::Down(const at::Tensor& gate_up_T2F, const Pass& pass,
                     LayerTape* tape) const {
  at::Tensor down_TH =
      LoraLinear(Gated(gate_up_T2F), layer_.weights.down, pass.lora,
                 {layer_.index, ProjectionGroup::kDown},
                 tape != nullptr ? &tape->shrunk_down : nullptr);
  SumOverRanks(layer_.tensor_group, down_TH);
  return down_TH;
}

void Mlp::Recompute(at::Tensor normed_TH, const Pass& pass,
                    LayerTape& tape) const {
  if (layer_.has_experts()) {
    moe::RecomputeExperts(experts(), normed_TH, pass.lora.routing,
                          tape.experts_TK, tape.experts);
    return;
  }
  tape.gate_up_T2F = GateUp(std::move(normed_TH), pass, &tape);
  if (layer_.config.output_norms) {
    tape.mlp_raw_TH = Down(tape.gate_up_T2F, pass, &tape);
  } else {
    tape.shrunk_down =
        lora::LoraShrink(Gated(tape.gate_up_T2F), layer_.weights.down,
                         pass.lora, {layer_.index, ProjectionGroup::kDown});
  }
}

void Mlp::Backward(const BackwardPass& pass, LayerTape& tape,
                   at::Tensor& d_TH) const {
  const LayerWeights& w = layer_.weights;
  const double eps = layer_.config.rms_norm_eps;
  const at::Tensor dy_TH =
      AddOutputBackward(d_TH, w.mlp_out_norm_H, eps, tape.mlp_raw_TH);
  at::Tensor d_normed_TH =
      layer_.has_experts()
          ? moe::BackwardExperts(
                experts(), dy_TH, Norm(tape.x_mid_TH, w.mlp_norm_H, eps),
                pass.lora.routing, pass.gradients, tape.experts)
          : DenseBackward(pass, tape, dy_TH);
  SumOverRanks(layer_.tensor_group, d_normed_TH);
  ops::RmsNormBackward(d_normed_TH, tape.x_mid_TH, w.mlp_norm_H, eps, d_TH);
}

at::Tensor Mlp::DenseBackward(const BackwardPass& pass, LayerTape& tape,
                              const at::Tensor& dy_TH) const {
  const LayerWeights& w = layer_.weights;
  at::Tensor product_TF = Gated(tape.gate_up_T2F);
  const at::Tensor d_product_TF = LoraLinearBackward(
      dy_TH, product_TF, w.down, pass.lora,
      {layer_.index, ProjectionGroup::kDown}, tape.shrunk_down, pass.gradients,
      /*want_input_gradient=*/true);
  product_TF.reset();
  // GatedProductBackward replaces gate_up_T2F by the gradient of gate_up_T2F.
  ops::GatedProductBackward(layer_.config.activation, d_product_TF,
                            tape.gate_up_T2F);
  return LoraLinearBackward(
      tape.gate_up_T2F,
      Norm(tape.x_mid_TH, w.mlp_norm_H, layer_.config.rms_norm_eps), w.gate_up,
      pass.lora, {layer_.index, ProjectionGroup::kGateUp}, tape.shrunk_gate_up,
      pass.gradients, /*want_input_gradient=*/true);
}

}  // namespace weft::model
