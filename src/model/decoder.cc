#include "src/model/decoder.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "src/base/observe/profile.h"
#include "src/lora/lora_embedding.h"
#include "src/lora/lora_linear.h"
#include "src/model/delta_layer.h"
#include "src/model/layer.h"
#include "src/model/packed_batch.h"
#include "src/model_config/model_shard.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/ops/int8_weight.h"
#include "src/ops/rms_norm.h"

namespace weft::model {
namespace {

// Returns the first column of a layer in experts_TE and experts_PSE.
int64_t ColumnOf(int layer, const model_config::ExpertShape& experts) {
  return experts.LayersBefore(layer) * int64_t{experts.per_token};
}

// Does the work of KeepExperts row by row. For the rows of a decode step, this
// takes less time than LibTorch needs to set up an indexed copy.
void KeepRowsCpu(const at::Tensor& experts_TK, const at::Tensor& slots_T,
                 int64_t column, const at::Tensor& experts_PSE) {
  const int64_t per_token = experts_TK.size(1);
  const int64_t width = experts_PSE.size(2);
  const int64_t num_slots = experts_PSE.size(0) * experts_PSE.size(1);
  const auto* slots = slots_T.const_data_ptr<int64_t>();
  const auto* from = experts_TK.const_data_ptr<int64_t>();
  auto* to = experts_PSE.mutable_data_ptr<int16_t>();
  for (int64_t t = 0; t < experts_TK.size(0); ++t) {
    TORCH_CHECK(slots[t] >= 0 && slots[t] < num_slots, "slots_T names slot ",
                slots[t], " of ", num_slots);
    for (int64_t k = 0; k < per_token; ++k) {
      to[slots[t] * width + column + k] =
          static_cast<int16_t>(from[t * per_token + k]);
    }
  }
}

// Returns the experts [T, K] i64 that the batch gives to a layer, or an
// undefined tensor if it gives none. At an entry of -1, the batch gives no
// expert.
at::Tensor GivenExperts(const PackedBatch& batch, int layer,
                        const model_config::ExpertShape& experts) {
  if (!batch.experts_TE.defined() || !experts.InLayer(layer)) return {};
  return batch.experts_TE
      .narrow(-1, ColumnOf(layer, experts), experts.per_token)
      .to(at::kLong);
}

// Writes a layer's experts [T, K] i64 to the tokens' slots in the cache.
// Errors:  throws c10::Error.
void KeepExperts(const at::Tensor& experts_TK, int layer,
                 const model_config::ExpertShape& experts, const KvAccess& kv) {
  const at::Tensor& experts_PSE = kv.store->experts_PSE;
  const int64_t column = ColumnOf(layer, experts);
  if (experts_PSE.is_cpu() && experts_TK.is_contiguous() &&
      kv.slots_T.is_contiguous()) {
    return KeepRowsCpu(experts_TK, kv.slots_T, column, experts_PSE);
  }
  if constexpr (ops::kHasCudaKernels) {
    // Rows that fill up a CUDA graph have negative slots.
    if (experts_PSE.is_cuda()) {
      return ops::cuda::KeepExperts(experts_TK, kv.slots_T, column,
                                    experts_PSE.flatten(0, 1));
    }
  }
  experts_PSE.flatten(0, 1)
      .narrow(-1, column, experts.per_token)
      .index_copy_(0, kv.slots_T, experts_TK.to(at::kShort));
}

// Returns the dtype of matrices that are not in 8 bits.
at::ScalarType StoredType(const DecoderWeights& weights) {
  const at::Tensor& embedding_VH = weights.embedding_VH;
  return ops::IsInt8(embedding_VH) ? weights.dtype : embedding_VH.scalar_type();
}

double EmbeddingScale(const model_config::ModelConfig& config,
                      const DecoderWeights& weights) {
  if (!config.scaled_embeddings) return config.embedding_multiplier;
  return at::scalar_tensor(std::sqrt(static_cast<double>(config.hidden)),
                           StoredType(weights))
      .item<double>();
}

// Converts norms, biases and routers from bf16 to the dtype of the activations,
// and leaves other matrices as they are. So on a CPU a router's product is
// never in bf16.
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
          &w.experts.down_bias_D, &w.delta_norm_V}) {
      convert(*tensor);
    }
    if (w.conv_WR1.defined()) {
      const at::ScalarType wide = dtype == at::kDouble ? dtype : at::kFloat;
      w.a_log_H = w.a_log_H.to(wide);
      w.dt_bias_H = w.dt_bias_H.to(wide);
      // The order in which the convolution reads its weights fastest.
      w.conv_WR1 = w.conv_WR1.to(wide).t().contiguous().t();
    }
    // Attention adds sinks to log-sum-exps, which are f32 unless the model is
    // f64.
    if (w.sinks_H.defined() && dtype != at::kDouble) {
      w.sinks_H = w.sinks_H.to(at::kFloat);
    }
  }
  convert(weights.final_norm_H);
  return weights;
}

// On a CPU, activations are never bf16; see Decoder::dtype.
at::ScalarType ActivationType(const DecoderWeights& weights) {
  const at::ScalarType dtype = StoredType(weights);
  return weights.embedding_VH.is_cpu() && dtype == at::kBFloat16 ? at::kFloat
                                                                 : dtype;
}

Stream ForwardAttention(const Layer& layer, Stream stream, const Pass& pass,
                        LayerTape* tape, KvAccess* kv) {
  return layer.has_delta()
             ? DeltaAttention(layer).Forward(std::move(stream), pass, tape, kv)
             : Attention(layer).Forward(std::move(stream), pass, tape, kv);
}

parallel::Shard ShardOfGroup(const parallel::Communicator* group) {
  return group == nullptr ? parallel::Shard() : group->shard();
}

}  // namespace

Decoder::Decoder(model_config::ModelConfig config, DecoderWeights weights,
                 int64_t num_positions, parallel::Communicator* tensor_group)
    : config_(std::move(config)),
      tensor_group_(tensor_group),
      local_config_(
          model_config::LocalConfig(config_, ShardOfGroup(tensor_group))),
      embedding_scale_(EmbeddingScale(config_, weights)),
      shape_(local_config_.shape()),
      dtype_(ActivationType(weights)),
      weights_(WithSmallTensorsIn(dtype_, std::move(weights))) {
  for (const std::vector<double>& frequencies : config_.rope_tables) {
    rotary_.push_back(ops::MakeRotaryTable(frequencies, num_positions,
                                           weights_.embedding_VH.device(),
                                           config_.rope_magnitude));
  }
  const model_config::QueryScale& scale = config_.query_scale;
  if (scale.beta > 0) {
    const at::Tensor factors_P = at::arange(num_positions, at::kDouble)
                                     .div_(scale.period)
                                     .floor_()
                                     .log1p_()
                                     .mul_(scale.beta)
                                     .add_(1)
                                     .to(at::kFloat);
    query_scale_P_ = ops::ToDevice(factors_P, device());
  }
  if (config_.logits_divisor != 1) {
    // In f32, or f64 for f64, so that the division does not round the weight to
    // a narrower type.
    at::Tensor& norm_H = weights_.final_norm_H;
    norm_H = norm_H.to(at::promote_types(norm_H.scalar_type(), at::kFloat))
                 .div(config_.logits_divisor);
  }
}

int Decoder::tensor_size() const { return ShardOfGroup(tensor_group_).size; }

at::Device Decoder::device() const { return weights_.embedding_VH.device(); }

at::Tensor Decoder::ForwardLayers(Mode mode, const PackedBatch& batch,
                                  Tape* tape, int num_recomputed, KvAccess* kv,
                                  std::vector<at::Tensor>* experts) const {
  const lora::RoutingTablePtr table =
      batch.table != nullptr
          ? batch.table
          : lora::MakeRoutingTable(batch.routing, /*gradients=*/{}, shape_,
                                   dtype_, device(),
                                   /*decode=*/kv != nullptr && kv->decode);
  const Pass pass = {.batch = batch,
                     .lora = {batch.routing, shape_, table.get()},
                     .delta = DeltaTreesOf(config_, batch, kv)};
  Stream stream = {.x_TH = Embed(batch)};
  if (config_.num_layers == 0) return stream.x_TH;
  stream.normed_TH = InputNorm(0, stream.x_TH);
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

bool Decoder::DecodesWithoutHost() const {
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    if (!shape_.experts.InLayer(layer)) continue;
    if (!SortsOnDevice({.layer = layer,
                        .weights = weights_.layers[layer].experts,
                        .config = local_config_,
                        .shape = shape_})) {
      return false;
    }
  }
  return true;
}

Layer Decoder::LayerAt(int index) const {
  return {.index = index,
          .weights = weights_.layers[index],
          .config = local_config_,
          .shape = shape_,
          .rotary = rotary_[config_.attention[index].rope_table],
          .query_scale_P = query_scale_P_,
          .tensor_group = tensor_group_};
}

at::Tensor Decoder::InputNorm(int index, const at::Tensor& x_TH) const {
  return Norm(x_TH, weights_.layers[index].input_norm_H, config_.rms_norm_eps);
}

Stream Decoder::RunLayer(int index, Stream stream, const Pass& pass,
                         LayerTape* tape, at::Tensor& experts_TK,
                         KvAccess* kv) const {
  const profile::Span span("layer forward", "layer", index);
  const Layer layer = LayerAt(index);
  Stream mid = ForwardAttention(layer, std::move(stream), pass, tape, kv);
  const bool is_last = index + 1 == config_.num_layers;
  Stream out = Mlp(layer).Forward(
      std::move(mid),
      is_last ? at::Tensor() : weights_.layers[index + 1].input_norm_H, pass,
      tape, experts_TK);
  if (kv != nullptr && kv->store->experts_PSE.defined() &&
      layer.has_experts()) {
    KeepExperts(experts_TK, index, shape_.experts, *kv);
  }
  return out;
}

void Decoder::BackwardLayers(const PackedBatch& batch, Tape& tape,
                             at::Tensor d_out_TH,
                             const lora::LoraGradients& gradients) const {
  const lora::RoutingTablePtr table = lora::MakeRoutingTable(
      batch.routing, gradients, shape_, dtype_, device());
  const BackwardPass pass = {
      {.batch = batch,
       .lora = {batch.routing, shape_, table.get()},
       .delta = DeltaTreesOf(config_, batch, /*kv=*/nullptr)},
      gradients};
  at::Tensor d_TH = std::move(d_out_TH);
  for (int index = config_.num_layers - 1; index >= 0; --index) {
    const profile::Span span("layer backward", "layer", index);
    LayerTape& layer_tape = tape.layers[index];
    if (!layer_tape.qkv_TW.defined()) RecomputeLayer(index, pass, layer_tape);
    const Layer layer = LayerAt(index);
    Mlp(layer).Backward(pass, layer_tape, d_TH);
    if (layer.has_delta()) {
      DeltaAttention(layer).Backward(pass, layer_tape, d_TH);
    } else {
      Attention(layer).Backward(pass, layer_tape, d_TH);
    }
    layer_tape = LayerTape();
  }
  EmbedBackward(pass, d_TH);
}

void Decoder::RecomputeLayer(int index, const Pass& pass,
                             LayerTape& tape) const {
  const profile::Span span("layer recomputed", "layer", index);
  const Layer layer = LayerAt(index);
  Stream mid = ForwardAttention(
      layer,
      {.x_TH = tape.x_in_TH, .normed_TH = InputNorm(index, tape.x_in_TH)}, pass,
      &tape, /*kv=*/nullptr);
  tape.x_mid_TH = std::move(mid.x_TH);
  Mlp(layer).Recompute(std::move(mid.normed_TH), pass, tape);
}

Decoder::TokenRows Decoder::RowsOf(const at::Tensor& tokens_T) const {
  const int64_t padding = config_.padding_token;
  if (tensor_group_ == nullptr) return {.rows_T = tokens_T, .padding = padding};
  const parallel::Range own =
      model_config::ShardOf(config_, tensor_group_->shard()).vocab;
  const bool has_padding = padding >= own.begin && padding < own.end;
  const at::Tensor foreign_T =
      tokens_T.lt(own.begin).logical_or_(tokens_T.ge(own.end));
  return {.rows_T = (tokens_T - own.begin).masked_fill_(foreign_T, 0),
          .foreign_T1 = foreign_T.unsqueeze(1),
          .padding = has_padding ? padding - own.begin : -1};
}

at::Tensor Decoder::Embed(const PackedBatch& batch) const {
  const TokenRows own = RowsOf(batch.tokens_T);
  at::Tensor x_TH = ops::WidenedRows(weights_.embedding_VH, own.rows_T, dtype_);
  if (embedding_scale_ != 1) x_TH.mul_(embedding_scale_);
  lora::AddLoraEmbedding(own.rows_T, batch.routing, embedding_scale_, x_TH);
  if (own.foreign_T1.defined()) x_TH.masked_fill_(own.foreign_T1, 0);
  SumOverRanks(tensor_group_, x_TH);
  return x_TH;
}

void Decoder::EmbedBackward(const BackwardPass& pass,
                            const at::Tensor& d_TH) const {
  const TokenRows own = RowsOf(pass.batch.tokens_T);
  lora::LoraEmbeddingBackward(
      own.foreign_T1.defined() ? d_TH.masked_fill(own.foreign_T1, 0) : d_TH,
      own.rows_T, pass.batch.routing, pass.gradients, embedding_scale_,
      own.padding);
}

at::Tensor Decoder::FinalNorm(const at::Tensor& x_RH) const {
  return Norm(x_RH, weights_.final_norm_H, config_.rms_norm_eps);
}

at::Tensor Decoder::FinalNormBackward(const at::Tensor& dy_RH,
                                      const at::Tensor& x_RH) const {
  at::Tensor dx_RH = at::zeros_like(x_RH);
  ops::RmsNormBackward(dy_RH, x_RH, weights_.final_norm_H, config_.rms_norm_eps,
                       dx_RH);
  return dx_RH;
}

}  // namespace weft::model
