#include "src/model/decoder.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "src/base/profile.h"
#include "src/base/status_macros.h"
#include "src/lora/lora_embedding.h"
#include "src/model/token_experts.h"
#include "src/model_config/model_shard.h"
#include "src/ops/gated_product.h"
#include "src/ops/int8_weight.h"
#include "src/ops/paged_attention.h"
#include "src/ops/rms_norm.h"
#include "src/ops/suffix_attention.h"

namespace weft::model {

using lora::LoraLinear;
using lora::ProjectionGroup;

namespace {

// Returns the dtype in which all is stored that is not in 8 bits.
at::ScalarType StoredType(const DecoderWeights& weights) {
  const at::Tensor& embedding_VH = weights.embedding_VH;
  return ops::IsInt8(embedding_VH) ? weights.dtype : embedding_VH.scalar_type();
}

double EmbeddingScale(const ModelConfig& config,
                      const DecoderWeights& weights) {
  if (!config.scaled_embeddings) return 1;
  return at::scalar_tensor(std::sqrt(static_cast<double>(config.hidden)),
                           StoredType(weights))
      .item<double>();
}

// Converts norms, biases and routers to the dtype of the activations, and
// leaves other matrices as they are. So a router's product is never in bf16 on
// a CPU.
DecoderWeights WithSmallTensorsIn(at::ScalarType dtype,
                                  DecoderWeights weights) {
  const auto convert = [&](at::Tensor& tensor) {
    if (tensor.defined() && tensor.scalar_type() == at::kBFloat16) {
      tensor = tensor.to(dtype);
    }
  };
  for (LayerWeights& w : weights.layers) {
    for (at::Tensor* tensor :
         {&w.input_norm_H, &w.q_norm_C, &w.k_norm_C, &w.attention_out_norm_H,
          &w.mlp_norm_H, &w.mlp_out_norm_H, &w.qkv.bias_O, &w.o.bias_O,
          &w.gate_up.bias_O, &w.down.bias_O, &w.experts.router_EH,
          &w.experts.router_bias_E, &w.experts.gate_up_bias_G,
          &w.experts.down_bias_D}) {
      convert(*tensor);
    }
    // They are added to log-sum-exps.
    if (w.sinks_H.defined() && dtype != at::kDouble) {
      w.sinks_H = w.sinks_H.to(at::kFloat);
    }
  }
  convert(weights.final_norm_H);
  return weights;
}

// On a CPU only the weights may be bf16; see decoder.h.
at::ScalarType ActivationType(const DecoderWeights& weights) {
  const at::ScalarType dtype = StoredType(weights);
  return weights.embedding_VH.is_cpu() && dtype == at::kBFloat16 ? at::kFloat
                                                                 : dtype;
}

parallel::Shard ShardOfGroup(const parallel::Communicator* group) {
  return group == nullptr ? parallel::Shard() : group->shard();
}

}  // namespace

Decoder::Decoder(ModelConfig config, DecoderWeights weights,
                 int64_t num_positions, parallel::Communicator* tensor_group)
    : config_(std::move(config)),
      tensor_group_(tensor_group),
      local_config_(LocalConfig(config_, ShardOfGroup(tensor_group))),
      embedding_scale_(EmbeddingScale(config_, weights)),
      shape_(local_config_.shape()),
      dtype_(ActivationType(weights)),
      weights_(WithSmallTensorsIn(dtype_, std::move(weights))) {
  for (const std::vector<double>& frequencies : config_.rope_tables) {
    rotary_.push_back(ops::MakeRotaryTable(frequencies, num_positions,
                                           weights_.embedding_VH.device()));
  }
}

int Decoder::tensor_size() const { return ShardOfGroup(tensor_group_).size; }

at::Device Decoder::device() const { return weights_.embedding_VH.device(); }

at::Tensor Decoder::Norm(const at::Tensor& x_TH,
                         const at::Tensor& weight_H) const {
  at::Tensor y_TH = at::empty_like(x_TH);
  ops::RmsNorm(x_TH, weight_H, config_.rms_norm_eps, y_TH);
  return y_TH;
}

at::Tensor Decoder::Gated(const at::Tensor& gate_up_T2F) const {
  at::Tensor product_TF =
      at::empty({gate_up_T2F.size(0), shape_.ffn}, gate_up_T2F.options());
  ops::GatedProduct(config_.activation, gate_up_T2F, product_TF);
  return product_TF;
}

TokenRows Decoder::RowsOf(const at::Tensor& tokens_T) const {
  if (tensor_group_ == nullptr) return {.rows_T = tokens_T};
  return RowsOfTokens(tokens_T, ShardOf(config_, tensor_group_->shard()).vocab);
}

void Decoder::SumOverRanks(at::Tensor& partial_TH) const {
  if (tensor_group_ != nullptr) tensor_group_->AllReduce(partial_TH);
}

at::Tensor Decoder::Embed(const PackedBatch& batch) const {
  const TokenRows own = RowsOf(batch.tokens_T);
  at::Tensor x_TH = ops::WidenedRows(weights_.embedding_VH, own.rows_T, dtype_);
  if (config_.scaled_embeddings) x_TH.mul_(embedding_scale_);
  lora::AddLoraEmbedding(own.rows_T, batch.routing, embedding_scale_, x_TH);
  if (own.foreign_T1.defined()) x_TH.masked_fill_(own.foreign_T1, 0);
  SumOverRanks(x_TH);
  return x_TH;
}

const ops::RotaryTable& Decoder::RotaryOf(int layer) const {
  return rotary_[config_.attention[layer].rope_table];
}

at::Tensor Decoder::FinalNorm(const at::Tensor& x_RH) const {
  return Norm(x_RH, weights_.final_norm_H);
}

ops::HeadNorms Decoder::HeadNormsOf(int layer) const {
  if (!config_.qk_norm) return {};
  const LayerWeights& w = weights_.layers[layer];
  return {.q_C = w.q_norm_C, .k_C = w.k_norm_C, .eps = config_.rms_norm_eps};
}

ops::Heads Decoder::SplitHeads(const at::Tensor& qkv_TW) const {
  const auto heads = [&](int64_t column, int64_t count) {
    return qkv_TW.as_strided({qkv_TW.size(0), count, config_.head_dim},
                             {qkv_TW.stride(0), config_.head_dim, 1},
                             qkv_TW.storage_offset() + column);
  };
  const int num_kv_heads = local_config_.num_kv_heads;
  const int64_t v_column = shape_.q_width + shape_.kv_width;
  return {.q_TQC = heads(0, local_config_.num_heads),
          .k_TKC = heads(shape_.q_width, num_kv_heads),
          .v_TKC = qkv_TW.size(1) > v_column ? heads(v_column, num_kv_heads)
                                             : at::Tensor()};
}

at::Tensor Decoder::ForwardLayers(Mode mode, const PackedBatch& batch,
                                  Tape* tape, int num_recomputed, KvAccess* kv,
                                  std::vector<at::Tensor>* experts) const {
  const lora::RoutingTablePtr table =
      batch.table != nullptr
          ? batch.table
          : lora::MakeRoutingTable(batch.routing, /*gradients=*/{}, shape_,
                                   dtype_, device());
  const Pass pass = {.batch = batch,
                     .lora = {batch.routing, shape_, table.get()}};
  Stream stream = {.x_TH = Embed(batch)};
  if (config_.num_layers == 0) return stream.x_TH;
  stream.normed_TH = Norm(stream.x_TH, weights_.layers[0].input_norm_H);
  if (mode == Mode::kTrain) tape->layers.resize(config_.num_layers);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    at::Tensor experts_TK = GivenExperts(batch, layer, shape_.experts);
    if (mode == Mode::kEval) {
      stream = RunLayer(layer, std::move(stream), pass, /*tape=*/nullptr,
                        experts_TK, kv);
    } else {
      LayerTape& layer_tape = tape->layers[layer];
      layer_tape.x_in_TH = stream.x_TH;
      stream = RunLayer(layer, std::move(stream), pass,
                        layer < num_recomputed ? nullptr : &layer_tape,
                        experts_TK, /*kv=*/nullptr);
      layer_tape.experts_TK = experts_TK;
    }
    if (experts != nullptr && shape_.experts.InLayer(layer)) {
      experts->push_back(std::move(experts_TK));
    }
  }
  return stream.x_TH;
}

absl::StatusOr<at::Tensor> Decoder::ForwardStreamed(at::Tensor x_TH,
                                                    const PackedBatch& batch,
                                                    const LayerLoader& load) {
  const Pass pass = {.batch = batch, .lora = {batch.routing, shape_}};
  if (config_.scaled_embeddings) x_TH = x_TH.mul(embedding_scale_);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    LayerWeights& weights = weights_.layers[layer];
    WEFT_ASSIGN_OR_RETURN(weights, load(layer));
    at::Tensor normed_TH = Norm(x_TH, weights.input_norm_H);
    at::Tensor experts_TK;
    x_TH = RunLayer(layer, {std::move(x_TH), std::move(normed_TH)}, pass,
                    /*tape=*/nullptr, experts_TK, /*kv=*/nullptr)
               .x_TH;
    weights = {};
  }
  return x_TH;
}

Decoder::Stream Decoder::RunLayer(int layer, Stream stream, const Pass& pass,
                                  LayerTape* tape, at::Tensor& experts_TK,
                                  KvAccess* kv) const {
  const profile::Span span("layer forward", "layer", layer);
  Stream mid = RunAttention(layer, std::move(stream), pass, tape, kv);
  const bool is_last = layer + 1 == config_.num_layers;
  Stream out = AddOutput(
      mid.x_TH, RunMlp(layer, std::move(mid.normed_TH), pass, tape, experts_TK),
      weights_.layers[layer].mlp_out_norm_H,
      is_last ? at::Tensor() : weights_.layers[layer + 1].input_norm_H,
      tape != nullptr ? &tape->mlp_raw_TH : nullptr);
  if (tape != nullptr) tape->x_mid_TH = std::move(mid.x_TH);
  if (kv != nullptr && kv->store->experts_PSE.defined() &&
      shape_.experts.InLayer(layer)) {
    KeepExperts(experts_TK, layer, shape_.experts, *kv);
  }
  return out;
}

moe::ExpertLayer Decoder::ExpertsOf(int layer) const {
  return {.layer = layer,
          .weights = weights_.layers[layer].experts,
          .config = local_config_,
          .shape = shape_};
}

at::Tensor Decoder::RunMlp(int layer, at::Tensor normed_TH, const Pass& pass,
                           LayerTape* tape, at::Tensor& experts_TK) const {
  if (shape_.experts.InLayer(layer)) {
    at::Tensor y_TH = moe::ForwardExperts(
        ExpertsOf(layer), normed_TH, pass.lora.routing, experts_TK,
        tape != nullptr ? &tape->experts : nullptr);
    SumOverRanks(y_TH);
    return y_TH;
  }
  at::Tensor gate_up_T2F = RunGateUp(layer, std::move(normed_TH), pass, tape);
  at::Tensor y_TH = RunDown(layer, gate_up_T2F, pass, tape);
  if (tape != nullptr) tape->gate_up_T2F = std::move(gate_up_T2F);
  return y_TH;
}

void Decoder::RecomputeLayer(int layer, const Pass& pass,
                             LayerTape& tape) const {
  const profile::Span span("layer recomputed", "layer", layer);
  at::Tensor normed_TH =
      Norm(tape.x_in_TH, weights_.layers[layer].input_norm_H);
  Stream mid = RunAttention(
      layer, {.x_TH = tape.x_in_TH, .normed_TH = std::move(normed_TH)}, pass,
      &tape, /*kv=*/nullptr);
  tape.x_mid_TH = std::move(mid.x_TH);
  if (shape_.experts.InLayer(layer)) {
    moe::RecomputeExperts(ExpertsOf(layer), mid.normed_TH, pass.lora.routing,
                          tape.experts_TK, tape.experts);
    return;
  }
  tape.gate_up_T2F = RunGateUp(layer, std::move(mid.normed_TH), pass, &tape);
  if (config_.output_norms) {
    tape.mlp_raw_TH = RunDown(layer, tape.gate_up_T2F, pass, &tape);
  } else {
    tape.shrunk_down = lora::LoraShrink(Gated(tape.gate_up_T2F), pass.lora,
                                        {layer, ProjectionGroup::kDown});
  }
}

Decoder::Stream Decoder::AddOutput(const at::Tensor& x_TH, at::Tensor y_TH,
                                   const at::Tensor& out_norm_H,
                                   const at::Tensor& next_norm_H,
                                   at::Tensor* raw) const {
  if (out_norm_H.defined()) {
    at::Tensor normed_TH = Norm(y_TH, out_norm_H);
    if (raw != nullptr) *raw = std::move(y_TH);
    y_TH = std::move(normed_TH);
  }
  if (!next_norm_H.defined()) return {.x_TH = y_TH.add_(x_TH)};
  at::Tensor normed_TH = at::empty_like(y_TH);
  ops::AddRmsNorm(x_TH, next_norm_H, config_.rms_norm_eps, y_TH, normed_TH);
  return {.x_TH = std::move(y_TH), .normed_TH = std::move(normed_TH)};
}

Decoder::Stream Decoder::RunAttention(int layer, Stream stream,
                                      const Pass& pass, LayerTape* tape,
                                      KvAccess* kv) const {
  const LayerWeights& w = weights_.layers[layer];
  at::Tensor qkv_TW = LoraLinear(stream.normed_TH, w.qkv, pass.lora,
                                 {layer, ProjectionGroup::kQkv},
                                 tape != nullptr ? &tape->shrunk_qkv : nullptr);
  stream.normed_TH.reset();
  const at::Tensor attended_TW = Attend(layer, qkv_TW, pass, tape, kv);
  at::Tensor o_TH =
      LoraLinear(attended_TW, w.o, pass.lora, {layer, ProjectionGroup::kO},
                 tape != nullptr ? &tape->shrunk_o : nullptr);
  SumOverRanks(o_TH);
  Stream mid = AddOutput(stream.x_TH, std::move(o_TH), w.attention_out_norm_H,
                         w.mlp_norm_H,
                         tape != nullptr ? &tape->attention_raw_TH : nullptr);
  if (tape != nullptr) tape->qkv_TW = std::move(qkv_TW);
  return mid;
}

at::Tensor Decoder::RunGateUp(int layer, at::Tensor normed_TH, const Pass& pass,
                              LayerTape* tape) const {
  return LoraLinear(normed_TH, weights_.layers[layer].gate_up, pass.lora,
                    {layer, ProjectionGroup::kGateUp},
                    tape != nullptr ? &tape->shrunk_gate_up : nullptr);
}

at::Tensor Decoder::RunDown(int layer, const at::Tensor& gate_up_T2F,
                            const Pass& pass, LayerTape* tape) const {
  at::Tensor down_TH =
      LoraLinear(Gated(gate_up_T2F), weights_.layers[layer].down, pass.lora,
                 {layer, ProjectionGroup::kDown},
                 tape != nullptr ? &tape->shrunk_down : nullptr);
  SumOverRanks(down_TH);
  return down_TH;
}

at::Tensor Decoder::Attend(int layer, at::Tensor& qkv_TW, const Pass& pass,
                           LayerTape* tape, KvAccess* kv) const {
  if (config_.qk_norm && tape != nullptr) {
    tape->qk_raw_TW =
        qkv_TW.narrow(1, 0, shape_.q_width + shape_.kv_width).clone();
  }
  const ops::Heads heads = SplitHeads(qkv_TW);
  ops::KvSlots slots;
  if (kv != nullptr) {
    slots = {.slots_T = kv->slots_T,
             .k_pages_PSKC = kv->store->k_pages_PSKC[layer],
             .v_pages_PSKC = kv->store->v_pages_PSKC[layer]};
  }
  ops::PrepareHeads(heads, pass.batch.positions_T, RotaryOf(layer),
                    HeadNormsOf(layer), slots);
  const ops::AttentionRule& rule = config_.attention[layer].rule;
  const at::Tensor& sinks_H = weights_.layers[layer].sinks_H;
  const int64_t num_tokens = qkv_TW.size(0);
  if (kv != nullptr) {
    const at::Tensor& k_pages = slots.k_pages_PSKC;
    const at::Tensor& v_pages = slots.v_pages_PSKC;
    if (kv->decode) {
      at::Tensor out = at::empty(heads.q_TQC.sizes(), qkv_TW.options());
      ops::PagedAttention(heads.q_TQC, k_pages, v_pages, kv->page_table_TL,
                          kv->lengths_T, rule, out, sinks_H);
      return out.view({num_tokens, shape_.q_width});
    }
    if (!kv->suffixes.empty()) {
      const auto gather = [kv](const at::Tensor& pages_PSKC) {
        return pages_PSKC.flatten(0, 1).index_select(0, kv->key_slots_S);
      };
      return ops::SuffixAttention(heads.q_TQC, gather(k_pages), gather(v_pages),
                                  kv->suffixes, rule, sinks_H)
          .view({num_tokens, shape_.q_width});
    }
  }
  ops::AttentionOutput attention = ops::TreeAttention(
      heads.q_TQC, heads.k_TKC, heads.v_TKC, pass.batch.nodes, rule,
      ops::AttentionMethod::kFused, sinks_H);
  at::Tensor out = attention.out_THC.reshape({num_tokens, shape_.q_width});
  if (tape != nullptr) tape->attention = std::move(attention);
  return out;
}

}  // namespace weft::model
