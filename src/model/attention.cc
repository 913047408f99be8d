#include "src/model/attention.h"

#include <ATen/ATen.h>

#include <utility>

#include "src/lora/lora_embedding.h"
#include "src/ops/paged_attention.h"
#include "src/ops/rms_norm.h"
#include "src/ops/suffix_attention.h"

namespace weft::model {

using lora::LoraLinear;
using lora::LoraLinearBackward;
using lora::ProjectionGroup;

Stream Attention::Forward(Stream stream, const Pass& pass, LayerTape* tape,
                          KvAccess* kv) const {
  const LayerWeights& w = layer_.weights;
  at::Tensor qkv_TW = LoraLinear(stream.normed_TH, w.qkv, pass.lora,
                                 {layer_.index, ProjectionGroup::kQkv},
                                 tape != nullptr ? &tape->shrunk_qkv : nullptr);
  stream.normed_TH.reset();
  const at::Tensor attended_TW = Attend(qkv_TW, pass, tape, kv);
  at::Tensor o_TH = LoraLinear(attended_TW, w.o, pass.lora,
                               {layer_.index, ProjectionGroup::kO},
                               tape != nullptr ? &tape->shrunk_o : nullptr);
  SumOverRanks(layer_.tensor_group, o_TH);
  Stream mid = AddOutput(stream.x_TH, std::move(o_TH), w.attention_out_norm_H,
                         w.mlp_norm_H, layer_.config.rms_norm_eps,
                         tape != nullptr ? &tape->attention_raw_TH : nullptr);
  if (tape != nullptr) tape->qkv_TW = std::move(qkv_TW);
  return mid;
}

ops::HeadNorms Attention::HeadNorms() const {
  if (!layer_.config.qk_norm) return {};
  return {.q_C = layer_.weights.q_norm_C,
          .k_C = layer_.weights.k_norm_C,
          .eps = layer_.config.rms_norm_eps};
}

ops::Heads Attention::SplitHeads(const at::Tensor& qkv_TW) const {
  const int head_dim = layer_.config.head_dim;
  const auto heads = [&](int64_t column, int64_t count) {
    return qkv_TW.as_strided({qkv_TW.size(0), count, head_dim},
                             {qkv_TW.stride(0), head_dim, 1},
                             qkv_TW.storage_offset() + column);
  };
  const int num_kv_heads = layer_.config.num_kv_heads;
  const lora::ModelShape& shape = layer_.shape;
  const int64_t v_column = shape.q_width + shape.kv_width;
  return {.q_TQC = heads(0, layer_.config.num_heads),
          .k_TKC = heads(shape.q_width, num_kv_heads),
          .v_TKC = qkv_TW.size(1) > v_column ? heads(v_column, num_kv_heads)
                                             : at::Tensor()};
}

ops::KvSlots Attention::SlotsOf(const KvAccess& kv) const {
  return {.slots_T = kv.slots_T,
          .k_pages_PSKC = kv.store->k_pages_PSKC[layer_.index],
          .v_pages_PSKC = kv.store->v_pages_PSKC[layer_.index]};
}

at::Tensor Attention::Attend(const at::Tensor& qkv_TW, const Pass& pass,
                             LayerTape* tape, KvAccess* kv) const {
  const lora::ModelShape& shape = layer_.shape;
  if (layer_.config.qk_norm && tape != nullptr) {
    tape->qk_raw_TW =
        qkv_TW.narrow(1, 0, shape.q_width + shape.kv_width).clone();
  }
  const ops::Heads heads = SplitHeads(qkv_TW);
  ops::KvSlots slots;
  if (kv != nullptr) slots = SlotsOf(*kv);
  ops::PrepareHeads(heads, pass.batch.positions_T, layer_.rotary, HeadNorms(),
                    slots);
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
  const LayerWeights& w = layer_.weights;
  const double eps = layer_.config.rms_norm_eps;
  const at::Tensor attended_TW =
      tape.attention.out_THC.reshape({d_TH.size(0), layer_.shape.q_width});
  const at::Tensor d_attended_TW = LoraLinearBackward(
      AddOutputBackward(d_TH, w.attention_out_norm_H, eps,
                        tape.attention_raw_TH),
      attended_TW, w.o, pass.lora, {layer_.index, ProjectionGroup::kO},
      tape.shrunk_o, pass.gradients, /*want_input_gradient=*/true);
  const at::Tensor dqkv_TW = AttendBackward(d_attended_TW, pass, tape);

  // Only an adapter of the embedding needs the first layer's input gradient.
  const bool want_input_gradient =
      layer_.index > 0 || lora::TrainsEmbedding(pass.gradients);
  at::Tensor d_normed_TH = LoraLinearBackward(
      dqkv_TW, Norm(tape.x_in_TH, w.input_norm_H, eps), w.qkv, pass.lora,
      {layer_.index, ProjectionGroup::kQkv}, tape.shrunk_qkv, pass.gradients,
      want_input_gradient);
  if (want_input_gradient) {
    SumOverRanks(layer_.tensor_group, d_normed_TH);
    ops::RmsNormBackward(d_normed_TH, tape.x_in_TH, w.input_norm_H, eps, d_TH);
  }
}

at::Tensor Attention::AttendBackward(const at::Tensor& d_attended_TW,
                                     const BackwardPass& pass,
                                     LayerTape& tape) const {
  at::Tensor dqkv_TW = at::empty_like(tape.qkv_TW);
  const ops::Heads heads = SplitHeads(tape.qkv_TW);
  const ops::Heads into = SplitHeads(dqkv_TW);
  // On a CPU, attention writes the gradients directly to dqkv_TW.
  ops::Heads d_heads = dqkv_TW.is_cpu() ? into : ops::Heads();
  ops::TreeAttentionBackward(d_attended_TW.view_as(tape.attention.out_THC),
                             heads.q_TQC, heads.k_TKC, heads.v_TKC,
                             tape.attention, pass.batch.nodes, rule(),
                             d_heads.q_TQC, d_heads.k_TKC, d_heads.v_TKC);
  ops::PrepareHeadsBackward(
      d_heads, pass.batch.positions_T, layer_.rotary, HeadNorms(),
      layer_.config.qk_norm ? SplitHeads(tape.qk_raw_TW) : ops::Heads(), into);
  return dqkv_TW;
}

}  // namespace weft::model
