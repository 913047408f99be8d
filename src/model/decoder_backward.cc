// The backward pass of Decoder. Each step mirrors one of decoder.cc, in reverse
// order.
#include <ATen/ATen.h>

#include <utility>

#include "src/base/profile.h"
#include "src/lora/lora_embedding.h"
#include "src/model/decoder.h"
#include "src/ops/gated_product.h"
#include "src/ops/rms_norm.h"

namespace weft::model {

using lora::LoraLinearBackward;
using lora::ProjectionGroup;

at::Tensor Decoder::FinalNormBackward(const at::Tensor& dy_RH,
                                      const at::Tensor& x_RH) const {
  at::Tensor dx_RH = at::zeros_like(x_RH);
  ops::RmsNormBackward(dy_RH, x_RH, weights_.final_norm_H, config_.rms_norm_eps,
                       dx_RH);
  return dx_RH;
}

void Decoder::BackwardLayers(const PackedBatch& batch, Tape& tape,
                             at::Tensor d_out_TH,
                             const lora::LoraGradients& gradients) const {
  const lora::RoutingTablePtr table = lora::MakeRoutingTable(
      batch.routing, gradients, shape_, dtype_, device());
  const BackwardPass pass = {
      {.batch = batch, .lora = {batch.routing, shape_, table.get()}},
      gradients};
  at::Tensor d_TH = std::move(d_out_TH);
  for (int layer = config_.num_layers - 1; layer >= 0; --layer) {
    const profile::Span span("layer backward", "layer", layer);
    LayerTape& layer_tape = tape.layers[layer];
    if (!layer_tape.qkv_TW.defined()) {
      RecomputeLayer(layer, pass, layer_tape);
    }
    BackwardMlp(layer, pass, layer_tape, d_TH);
    BackwardAttention(layer, pass, layer_tape, d_TH);
    layer_tape = LayerTape();
  }
  EmbedBackward(pass, d_TH);
}

void Decoder::EmbedBackward(const BackwardPass& pass,
                            const at::Tensor& d_TH) const {
  const TokenRows own = RowsOf(pass.batch.tokens_T);
  lora::LoraEmbeddingBackward(
      own.foreign_T1.defined() ? d_TH.masked_fill(own.foreign_T1, 0) : d_TH,
      own.rows_T, pass.batch.routing, pass.gradients, embedding_scale_);
}

at::Tensor Decoder::AddOutputBackward(const at::Tensor& d_TH,
                                      const at::Tensor& out_norm_H,
                                      const at::Tensor& raw_TH) const {
  if (!out_norm_H.defined()) return d_TH;
  at::Tensor d_raw_TH = at::zeros_like(raw_TH);
  ops::RmsNormBackward(d_TH, raw_TH, out_norm_H, config_.rms_norm_eps,
                       d_raw_TH);
  return d_raw_TH;
}

void Decoder::BackwardMlp(int layer, const BackwardPass& pass, LayerTape& tape,
                          at::Tensor& d_TH) const {
  const LayerWeights& w = weights_.layers[layer];
  const at::Tensor dy_TH =
      AddOutputBackward(d_TH, w.mlp_out_norm_H, tape.mlp_raw_TH);
  at::Tensor d_normed_TH =
      shape_.experts.InLayer(layer)
          ? moe::BackwardExperts(
                ExpertsOf(layer), dy_TH, Norm(tape.x_mid_TH, w.mlp_norm_H),
                pass.lora.routing, pass.gradients, tape.experts)
          : BackwardDense(layer, pass, tape, dy_TH);
  SumOverRanks(d_normed_TH);
  ops::RmsNormBackward(d_normed_TH, tape.x_mid_TH, w.mlp_norm_H,
                       config_.rms_norm_eps, d_TH);
}

at::Tensor Decoder::BackwardDense(int layer, const BackwardPass& pass,
                                  LayerTape& tape,
                                  const at::Tensor& dy_TH) const {
  const LayerWeights& w = weights_.layers[layer];
  at::Tensor product_TF = Gated(tape.gate_up_T2F);
  const at::Tensor d_product_TF = LoraLinearBackward(
      dy_TH, product_TF, w.down, pass.lora, {layer, ProjectionGroup::kDown},
      tape.shrunk_down, pass.gradients,
      /*want_input_gradient=*/true);
  product_TF.reset();
  // This replaces gate_up_T2F by its own gradient.
  ops::GatedProductBackward(config_.activation, d_product_TF, tape.gate_up_T2F);
  return LoraLinearBackward(
      tape.gate_up_T2F, Norm(tape.x_mid_TH, w.mlp_norm_H), w.gate_up, pass.lora,
      {layer, ProjectionGroup::kGateUp}, tape.shrunk_gate_up, pass.gradients,
      /*want_input_gradient=*/true);
}

void Decoder::BackwardAttention(int layer, const BackwardPass& pass,
                                LayerTape& tape, at::Tensor& d_TH) const {
  const LayerWeights& w = weights_.layers[layer];
  const at::Tensor attended_TW =
      tape.attention.out_THC.reshape({d_TH.size(0), shape_.q_width});
  const at::Tensor d_attended_TW = LoraLinearBackward(
      AddOutputBackward(d_TH, w.attention_out_norm_H, tape.attention_raw_TH),
      attended_TW, w.o, pass.lora, {layer, ProjectionGroup::kO}, tape.shrunk_o,
      pass.gradients,
      /*want_input_gradient=*/true);

  at::Tensor dqkv_TW = at::empty_like(tape.qkv_TW);
  const ops::Heads heads = SplitHeads(tape.qkv_TW);
  const ops::Heads into = SplitHeads(dqkv_TW);
  // On a CPU, attention writes the gradients directly to dqkv_TW.
  ops::Heads d_heads = dqkv_TW.is_cpu() ? into : ops::Heads();
  ops::TreeAttentionBackward(d_attended_TW.view_as(tape.attention.out_THC),
                             heads.q_TQC, heads.k_TKC, heads.v_TKC,
                             tape.attention, pass.batch.nodes,
                             config_.attention[layer].rule, d_heads.q_TQC,
                             d_heads.k_TKC, d_heads.v_TKC);
  ops::PrepareHeadsBackward(
      d_heads, pass.batch.positions_T, RotaryOf(layer), HeadNormsOf(layer),
      config_.qk_norm ? SplitHeads(tape.qk_raw_TW) : ops::Heads(), into);

  // Below the first layer only an adapter of the embedding can learn.
  const bool want_input_gradient =
      layer > 0 || lora::TrainsEmbedding(pass.gradients);
  at::Tensor d_normed_TH =
      LoraLinearBackward(dqkv_TW, Norm(tape.x_in_TH, w.input_norm_H), w.qkv,
                         pass.lora, {layer, ProjectionGroup::kQkv},
                         tape.shrunk_qkv, pass.gradients, want_input_gradient);
  if (want_input_gradient) {
    SumOverRanks(d_normed_TH);
    ops::RmsNormBackward(d_normed_TH, tape.x_in_TH, w.input_norm_H,
                         config_.rms_norm_eps, d_TH);
  }
}

}  // namespace weft::model
