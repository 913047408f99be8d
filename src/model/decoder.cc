#include "src/model/decoder.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "src/ops/paged_attention.h"
#include "src/ops/rms_norm.h"
#include "src/ops/swiglu.h"

namespace weft::model {

using lora::LoraLinear;
using lora::LoraSite;
using lora::ProjectionGroup;
using lora::ShrunkInputs;

Decoder::Decoder(ModelConfig config, DecoderWeights weights,
                 int64_t num_positions)
    : config_(std::move(config)),
      shape_(config_.shape()),
      weights_(std::move(weights)),
      rotary_(ops::MakeRotaryTable(config_.inverse_frequencies, num_positions,
                                   weights_.embedding_VH.device())),
      attention_scale_(1.0 / std::sqrt(static_cast<double>(config_.head_dim))) {
}

at::ScalarType Decoder::dtype() const {
  return weights_.embedding_VH.scalar_type();
}

at::Device Decoder::device() const { return weights_.embedding_VH.device(); }

at::Tensor Decoder::Norm(const at::Tensor& x_TH,
                         const at::Tensor& weight_H) const {
  at::Tensor y_TH = at::empty_like(x_TH);
  ops::RmsNorm(x_TH, weight_H, config_.rms_norm_eps, y_TH);
  return y_TH;
}

at::Tensor Decoder::FinalNorm(const at::Tensor& x_RH) const {
  return Norm(x_RH, weights_.final_norm_H);
}

Decoder::Heads Decoder::SplitHeads(const at::Tensor& qkv_TW) const {
  const int64_t num_tokens = qkv_TW.size(0);
  const auto heads = [&](int64_t column, int64_t width, int64_t count) {
    return qkv_TW.narrow(1, column, width)
        .view({num_tokens, count, config_.head_dim});
  };
  return {.q_TQC = heads(0, shape_.q_width, config_.num_heads),
          .k_TKC = heads(shape_.q_width, shape_.kv_width, config_.num_kv_heads),
          .v_TKC = heads(shape_.q_width + shape_.kv_width, shape_.kv_width,
                         config_.num_kv_heads)};
}

at::Tensor Decoder::ForwardLayers(Mode mode, const PackedBatch& batch,
                                  Tape* tape, int num_recomputed,
                                  KvAccess* kv) const {
  at::Tensor x_TH = weights_.embedding_VH.index_select(0, batch.tokens_T);
  if (mode == Mode::kEval) {
    for (int layer = 0; layer < config_.num_layers; ++layer) {
      x_TH = RunLayer(layer, x_TH, batch, /*tape=*/nullptr, kv);
    }
    return x_TH;
  }
  tape->layers.resize(config_.num_layers);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    LayerTape& layer_tape = tape->layers[layer];
    layer_tape.x_in_TH = x_TH;
    x_TH = RunLayer(layer, x_TH, batch,
                    layer < num_recomputed ? nullptr : &layer_tape,
                    /*kv=*/nullptr);
  }
  return x_TH;
}

at::Tensor Decoder::RunLayer(int layer, const at::Tensor& x_TH,
                             const PackedBatch& batch, LayerTape* tape,
                             KvAccess* kv) const {
  const LayerWeights& w = weights_.layers[layer];
  const auto linear = [&](const at::Tensor& input, const lora::BaseLinear& base,
                          ProjectionGroup group,
                          ShrunkInputs LayerTape::*slot) {
    return LoraLinear(input, base, batch.routing, {layer, group}, shape_,
                      tape != nullptr ? &(tape->*slot) : nullptr);
  };

  at::Tensor qkv_TW = linear(Norm(x_TH, w.input_norm_H), w.qkv,
                             ProjectionGroup::kQkv, &LayerTape::shrunk_qkv);
  const at::Tensor attended_TW = Attend(layer, qkv_TW, batch, tape, kv);
  at::Tensor x_mid_TH =
      linear(attended_TW, w.o, ProjectionGroup::kO, &LayerTape::shrunk_o);
  x_mid_TH.add_(x_TH);

  at::Tensor gate_up_T2F =
      linear(Norm(x_mid_TH, w.post_norm_H), w.gate_up, ProjectionGroup::kGateUp,
             &LayerTape::shrunk_gate_up);
  at::Tensor product_TF =
      at::empty({x_TH.size(0), shape_.ffn}, gate_up_T2F.options());
  ops::SwiGlu(gate_up_T2F, product_TF);
  at::Tensor x_out_TH = linear(product_TF, w.down, ProjectionGroup::kDown,
                               &LayerTape::shrunk_down);
  x_out_TH.add_(x_mid_TH);

  if (tape != nullptr) {
    tape->qkv_TW = std::move(qkv_TW);
    tape->x_mid_TH = std::move(x_mid_TH);
    tape->gate_up_T2F = std::move(gate_up_T2F);
  }
  return x_out_TH;
}

void Decoder::NormalizeHeads(int layer, at::Tensor& qkv_TW,
                             LayerTape* tape) const {
  const LayerWeights& w = weights_.layers[layer];
  const auto normalize = [&](at::Tensor heads_TMC, const at::Tensor& weight_C) {
    const at::Tensor raw = heads_TMC.contiguous();
    const at::Tensor rows = raw.view({-1, config_.head_dim});
    at::Tensor normed = at::empty_like(rows);
    ops::RmsNorm(rows, weight_C, config_.rms_norm_eps, normed);
    heads_TMC.copy_(normed.view_as(raw));
    return raw;
  };
  Heads heads = SplitHeads(qkv_TW);
  at::Tensor q_raw = normalize(heads.q_TQC, w.q_norm_C);
  at::Tensor k_raw = normalize(heads.k_TKC, w.k_norm_C);
  if (tape != nullptr) {
    tape->q_raw_TQC = std::move(q_raw);
    tape->k_raw_TKC = std::move(k_raw);
  }
}

at::Tensor Decoder::Attend(int layer, at::Tensor& qkv_TW,
                           const PackedBatch& batch, LayerTape* tape,
                           KvAccess* kv) const {
  if (config_.qk_norm) NormalizeHeads(layer, qkv_TW, tape);
  Heads heads = SplitHeads(qkv_TW);
  ops::ApplyRotary(heads.q_TQC, batch.positions_T, rotary_, /*inverse=*/false);
  ops::ApplyRotary(heads.k_TKC, batch.positions_T, rotary_, /*inverse=*/false);
  const int64_t num_tokens = qkv_TW.size(0);
  if (kv != nullptr) {
    at::Tensor& k_pages = kv->store->k_pages_PSKC[layer];
    at::Tensor& v_pages = kv->store->v_pages_PSKC[layer];
    ops::WriteKvPages(heads.k_TKC, heads.v_TKC, kv->slots_T, k_pages, v_pages);
    if (kv->decode) {
      at::Tensor out = at::empty(heads.q_TQC.sizes(), qkv_TW.options());
      ops::PagedAttention(heads.q_TQC, k_pages, v_pages, kv->page_table_TL,
                          kv->lengths_T, attention_scale_, out);
      return out.view({num_tokens, shape_.q_width});
    }
  }
  ops::AttentionOutput attention = ops::TreeAttention(
      heads.q_TQC, heads.k_TKC, heads.v_TKC, batch.nodes, attention_scale_);
  at::Tensor out = attention.out_THC.reshape({num_tokens, shape_.q_width});
  if (tape != nullptr) tape->attention = std::move(attention);
  return out;
}

}  // namespace weft::model
