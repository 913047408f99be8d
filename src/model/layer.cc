#include "src/model/layer.h"

#include <ATen/ATen.h>

#include <utility>

#include "src/model/layer_projections.h"
#include "src/ops/gated_product.h"
#include "src/ops/paged_attention.h"
#include "src/ops/pointwise.h"
#include "src/ops/rms_norm.h"
#include "src/ops/tree_attention.h"

namespace weft::model {

using lora::LoraLinear;
using lora::LoraLinearBackward;
using lora::ProjectionGroup;

at::Tensor Norm(const at::Tensor& x_TH, const at::Tensor& weight_H,
                double eps) {
  if (!weight_H.defined()) return x_TH;
  at::Tensor y_TH = at::empty_like(x_TH);
  ops::RmsNorm(x_TH, weight_H, eps, y_TH);
  return y_TH;
}

void NormBackward(const at::Tensor& dy_TH, const at::Tensor& x_TH,
                  const at::Tensor& weight_H, double eps, at::Tensor& dx_TH) {
  if (weight_H.defined()) {
    ops::RmsNormBackward(dy_TH, x_TH, weight_H, eps, dx_TH);
  } else {
    dx_TH.add_(dy_TH);
  }
}

void SumOverRanks(parallel::Communicator* group, at::Tensor& partial_TH) {
  if (group != nullptr) group->AllReduce(partial_TH);
}

Stream AddOutput(const at::Tensor& x_TH, at::Tensor y_TH,
                 const at::Tensor& out_norm_H, const at::Tensor& next_norm_H,
                 double eps, at::Tensor* raw) {
  if (out_norm_H.defined()) {
    at::Tensor normed_TH = Norm(y_TH, out_norm_H, eps);
    if (raw != nullptr) *raw = std::move(y_TH);
    y_TH = std::move(normed_TH);
  }
  if (!next_norm_H.defined()) {
    y_TH.add_(x_TH);
    return {.x_TH = y_TH, .normed_TH = y_TH};
  }
  at::Tensor normed_TH = at::empty_like(y_TH);
  ops::AddRmsNorm(x_TH, next_norm_H, eps, y_TH, normed_TH);
  return {.x_TH = std::move(y_TH), .normed_TH = std::move(normed_TH)};
}

at::Tensor AddOutputBackward(const at::Tensor& d_TH,
                             const at::Tensor& out_norm_H, double eps,
                             const at::Tensor& raw_TH) {
  if (!out_norm_H.defined()) return d_TH;
  at::Tensor d_raw_TH = at::zeros_like(raw_TH);
  ops::RmsNormBackward(d_TH, raw_TH, out_norm_H, eps, d_raw_TH);
  return d_raw_TH;
}

Stream Attention::Forward(Stream stream, const Pass& pass, LayerTape* tape,
                          KvAccess* kv) const {
  at::Tensor qkv_TW = ProjectInputs(layer_, stream, pass, tape);
  const at::Tensor attended_TW = Attend(qkv_TW, pass, tape, kv);
  Stream mid = ProjectOutput(layer_, stream.x_TH, Gated(attended_TW, qkv_TW),
                             pass, tape);
  if (tape != nullptr) tape->qkv_TW = std::move(qkv_TW);
  return mid;
}

ops::HeadNorms Attention::HeadNorms() const {
  if (layer_.config.qk_norm != model_config::QkNorm::kHead) return {};
  return {.q_C = layer_.weights.q_norm_C,
          .k_C = layer_.weights.k_norm_C,
          .eps = layer_.config.rms_norm_eps};
}

void Attention::NormWholeQk(at::Tensor& qkv_TW) const {
  if (layer_.config.qk_norm != model_config::QkNorm::kWhole) return;
  const LayerWeights& w = layer_.weights;
  const double eps = layer_.config.rms_norm_eps;
  at::Tensor q_TW = qkv_TW.narrow(1, 0, layer_.shape.q_width);
  ops::RmsNorm(q_TW, w.q_norm_C, eps, q_TW);
  at::Tensor k_TW =
      qkv_TW.narrow(1, layer_.shape.q_width, layer_.shape.kv_width);
  ops::RmsNorm(k_TW, w.k_norm_C, eps, k_TW);
}

void Attention::NormWholeQkBackward(const at::Tensor& raw_TW,
                                    at::Tensor& dqkv_TW) const {
  if (layer_.config.qk_norm != model_config::QkNorm::kWhole) return;
  const auto replace = [&](const at::Tensor& weight, int64_t column,
                           int64_t width) {
    at::Tensor d_TW = dqkv_TW.narrow(1, column, width);
    const at::Tensor dy_TW = d_TW.clone();
    d_TW.zero_();
    ops::RmsNormBackward(dy_TW, raw_TW.narrow(1, column, width), weight,
                         layer_.config.rms_norm_eps, d_TW);
  };
  const model_config::ModelShape& shape = layer_.shape;
  replace(layer_.weights.q_norm_C, 0, shape.q_width);
  replace(layer_.weights.k_norm_C, shape.q_width, shape.kv_width);
}

void Attention::ScaleQueries(const Pass& pass, const at::Tensor& q_TQC) const {
  if (!layer_.query_scale_P.defined()) return;
  q_TQC.mul_(layer_.query_scale_P.index_select(0, pass.batch.positions_T)
                 .view({-1, 1, 1}));
}

ops::Heads Attention::SplitHeads(const at::Tensor& qkv_TW) const {
  const int head_dim = layer_.config.head_dim;
  const auto heads = [&](int64_t column, int64_t count, int64_t stride) {
    return qkv_TW.as_strided({qkv_TW.size(0), count, head_dim},
                             {qkv_TW.stride(0), stride, 1},
                             qkv_TW.storage_offset() + column);
  };
  const int num_kv_heads = layer_.config.num_kv_heads;
  const model_config::ModelShape& shape = layer_.shape;
  const int64_t k_column = shape.q_width + shape.gate_width;
  const int64_t v_column = k_column + shape.kv_width;
  return {.q_TQC = heads(0, layer_.config.num_heads,
                         layer_.config.output_gate ? 2 * head_dim : head_dim),
          .k_TKC = heads(k_column, num_kv_heads, head_dim),
          .v_TKC = qkv_TW.size(1) > v_column
                       ? heads(v_column, num_kv_heads, head_dim)
                       : at::Tensor()};
}

at::Tensor Attention::Gates(const at::Tensor& qkv_TW) const {
  const int64_t head_dim = layer_.config.head_dim;
  return qkv_TW.as_strided({qkv_TW.size(0), layer_.config.num_heads, head_dim},
                           {qkv_TW.stride(0), 2 * head_dim, 1},
                           qkv_TW.storage_offset() + head_dim);
}

at::Tensor Attention::Gated(const at::Tensor& attended_TW,
                            const at::Tensor& qkv_TW) const {
  if (!layer_.config.output_gate) return attended_TW;
  return ops::Sigmoid(Gates(qkv_TW))
      .mul_(attended_TW.view(
          {-1, layer_.config.num_heads, layer_.config.head_dim}))
      .view_as(attended_TW);
}

at::Tensor Attention::GatedBackward(const at::Tensor& d_gated_TW,
                                    const LayerTape& tape,
                                    const at::Tensor& dqkv_TW) const {
  if (!layer_.config.output_gate) return d_gated_TW;
  const at::Tensor& attended_TQC = tape.attention.out_THC;
  const at::Tensor d_gated_TQC = d_gated_TW.view_as(attended_TQC);
  const at::Tensor gate_TQC = ops::Sigmoid(Gates(tape.qkv_TW));
  at::Tensor d_TQC = d_gated_TQC * gate_TQC;
  // The derivative of the sigmoid s is s (1 - s).
  Gates(dqkv_TW).copy_(d_TQC * attended_TQC * (1 - gate_TQC));
  return d_TQC.view_as(d_gated_TW);
}

ops::KvSlots Attention::SlotsOf(const KvAccess& kv) const {
  return {.slots_T = kv.slots_T,
          .k_pages_PSKC = kv.store->k_pages_PSKC[layer_.index],
          .v_pages_PSKC = kv.store->v_pages_PSKC[layer_.index]};
}

at::Tensor Attention::Attend(at::Tensor& qkv_TW, const Pass& pass,
                             LayerTape* tape, KvAccess* kv) const {
  const model_config::ModelShape& shape = layer_.shape;
  if (layer_.config.qk_norm != model_config::QkNorm::kNone && tape != nullptr) {
    tape->qk_raw_TW =
        qkv_TW.narrow(1, 0, shape.q_width + shape.gate_width + shape.kv_width)
            .clone();
  }
  NormWholeQk(qkv_TW);
  const ops::Heads heads = SplitHeads(qkv_TW);
  ops::KvSlots slots;
  if (kv != nullptr) slots = SlotsOf(*kv);
  ops::PrepareHeads(heads, pass.batch.positions_T, layer_.rotary, HeadNorms(),
                    slots);
  ScaleQueries(pass, heads.q_TQC);
  const int64_t num_tokens = qkv_TW.size(0);
  if (kv != nullptr && (kv->decode || !kv->suffixes.empty())) {
    return AttendToPages(heads.q_TQC, slots, *kv)
        .view({num_tokens, shape.q_width});
  }
  ops::AttentionOutput attention = ops::TreeAttention(
      heads.q_TQC, heads.k_TKC, heads.v_TKC, pass.batch.nodes, rule(),
      ops::AttentionMethod::kFused, layer_.weights.sinks_H);
  at::Tensor out = attention.out_THC.reshape({num_tokens, shape.q_width});
  if (tape != nullptr) tape->attention = std::move(attention);
  return out;
}

at::Tensor Attention::AttendToPages(const at::Tensor& q_TQC,
                                    const ops::KvSlots& slots,
                                    const KvAccess& kv) const {
  const at::Tensor& sinks_H = layer_.weights.sinks_H;
  if (kv.decode) {
    at::Tensor out_TQC = at::empty(q_TQC.sizes(), q_TQC.options());
    ops::PagedAttention(q_TQC, slots.k_pages_PSKC, slots.v_pages_PSKC,
                        kv.page_table_TL, kv.lengths_T, rule(), out_TQC,
                        sinks_H);
    return out_TQC;
  }
  const auto gather = [&kv](const at::Tensor& pages_PSKC) {
    return pages_PSKC.flatten(0, 1).index_select(0, kv.key_slots_S);
  };
  return ops::SuffixAttention(q_TQC, gather(slots.k_pages_PSKC),
                              gather(slots.v_pages_PSKC), kv.suffixes, rule(),
                              sinks_H);
}

void Attention::Backward(const BackwardPass& pass, LayerTape& tape,
                         at::Tensor& d_TH) const {
  const at::Tensor attended_TW =
      tape.attention.out_THC.reshape({d_TH.size(0), layer_.shape.q_width});
  const at::Tensor d_gated_TW = ProjectOutputBackward(
      layer_, d_TH, Gated(attended_TW, tape.qkv_TW), pass, tape);
  ProjectInputsBackward(layer_, AttendBackward(d_gated_TW, pass, tape), pass,
                        tape, d_TH);
}

at::Tensor Attention::AttendBackward(const at::Tensor& d_gated_TW,
                                     const BackwardPass& pass,
                                     LayerTape& tape) const {
  at::Tensor dqkv_TW = at::empty_like(tape.qkv_TW);
  const at::Tensor d_attended_TW = GatedBackward(d_gated_TW, tape, dqkv_TW);
  const ops::Heads heads = SplitHeads(tape.qkv_TW);
  const ops::Heads into = SplitHeads(dqkv_TW);
  // On a CPU, attention writes the gradients directly to dqkv_TW.
  ops::Heads d_heads = dqkv_TW.is_cpu() ? into : ops::Heads();
  ops::TreeAttentionBackward(d_attended_TW.view_as(tape.attention.out_THC),
                             heads.q_TQC, heads.k_TKC, heads.v_TKC,
                             tape.attention, pass.batch.nodes, rule(),
                             d_heads.q_TQC, d_heads.k_TKC, d_heads.v_TKC);
  ScaleQueries(pass, d_heads.q_TQC);
  const bool has_head_norms =
      layer_.config.qk_norm == model_config::QkNorm::kHead;
  ops::PrepareHeadsBackward(
      d_heads, pass.batch.positions_T, layer_.rotary, HeadNorms(),
      has_head_norms ? SplitHeads(tape.qk_raw_TW) : ops::Heads(), into);
  NormWholeQkBackward(tape.qk_raw_TW, dqkv_TW);
  return dqkv_TW;
}

ExpertLayer Mlp::experts() const {
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
        ForwardExperts(experts(), normed_TH, pass.lora, experts_TK,
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

at::Tensor Mlp::Down(const at::Tensor& gate_up_T2F, const Pass& pass,
                     LayerTape* tape) const {
  at::Tensor down_TH = LoraLinear(
      ops::GatedProduct(layer_.config.activation, gate_up_T2F),
      layer_.weights.down, pass.lora, {layer_.index, ProjectionGroup::kDown},
      tape != nullptr ? &tape->shrunk_down : nullptr);
  SumOverRanks(layer_.tensor_group, down_TH);
  return down_TH;
}

void Mlp::Recompute(at::Tensor normed_TH, const Pass& pass,
                    LayerTape& tape) const {
  if (layer_.has_experts()) {
    return RecomputeExperts(experts(), normed_TH, pass.lora, tape.experts_TK,
                            tape.experts);
  }
  tape.gate_up_T2F = GateUp(std::move(normed_TH), pass, &tape);
  if (layer_.config.has_output_norms()) {
    tape.mlp_raw_TH = Down(tape.gate_up_T2F, pass, &tape);
  } else {
    tape.shrunk_down = lora::LoraShrink(
        ops::GatedProduct(layer_.config.activation, tape.gate_up_T2F),
        layer_.weights.down, pass.lora, {layer_.index, ProjectionGroup::kDown});
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
          ? BackwardExperts(experts(), dy_TH,
                            Norm(tape.x_mid_TH, w.mlp_norm_H, eps), pass.lora,
                            pass.gradients, tape.experts)
          : DenseBackward(pass, tape, dy_TH);
  SumOverRanks(layer_.tensor_group, d_normed_TH);
  NormBackward(d_normed_TH, tape.x_mid_TH, w.mlp_norm_H, eps, d_TH);
}

at::Tensor Mlp::DenseBackward(const BackwardPass& pass, LayerTape& tape,
                              const at::Tensor& dy_TH) const {
  const LayerWeights& w = layer_.weights;
  at::Tensor product_TF =
      ops::GatedProduct(layer_.config.activation, tape.gate_up_T2F);
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
