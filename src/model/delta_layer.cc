#include "src/model/delta_layer.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "src/model/layer_projections.h"
#include "src/ops/tree_attention.h"

namespace weft::model {

static_assert(model_config::kMaxConvKernel == ops::kMaxDeltaTaps);

namespace {

// Returns the sequences of a prefill, as roots.
std::vector<ops::AttentionNode> SequencesOf(const KvAccess& kv,
                                            const PackedBatch& batch) {
  if (kv.suffixes.empty()) return batch.nodes;
  std::vector<ops::AttentionNode> sequences;
  for (const ops::SuffixRows& rows : kv.suffixes) {
    const int64_t end = rows.q_begin + rows.q_size;
    sequences.push_back(
        {.begin = rows.q_begin, .end = end, .parent = -1, .subtree_end = end});
  }
  return sequences;
}

}  // namespace

ops::DeltaTrees DeltaTreesOf(const model_config::ModelConfig& config,
                             const PackedBatch& batch, const KvAccess* kv) {
  if (!config.has_delta() || (kv != nullptr && kv->decode)) {
    return ops::DeltaTrees({});
  }
  if (kv == nullptr) return ops::DeltaTrees(batch.nodes);
  return ops::DeltaTrees(SequencesOf(*kv, batch), kv->state_slots_Q);
}

ops::DeltaParameters DeltaAttention::Parameters() const {
  const LayerWeights& w = layer_.weights;
  const model_config::DeltaShape& delta = layer_.shape.delta;
  return {.conv_WR1 = w.conv_WR1,
          .a_log_H = w.a_log_H,
          .dt_bias_H = w.dt_bias_H,
          .num_key_heads = delta.key_heads,
          .num_value_heads = delta.value_heads,
          .key_features = delta.key_features,
          .value_features = delta.value_features};
}

ops::DeltaInputs DeltaAttention::RuleInputs(const at::Tensor& inputs_TW) const {
  const model_config::DeltaShape& delta = layer_.shape.delta;
  const int64_t gates = delta.conv_width() + delta.value_width();
  return {.qkv_TW = inputs_TW.narrow(1, 0, delta.conv_width()),
          .beta_TH = inputs_TW.narrow(1, gates, delta.value_heads),
          .alpha_TH = inputs_TW.narrow(1, gates + delta.value_heads,
                                       delta.value_heads)};
}

at::Tensor DeltaAttention::OutputGates(const at::Tensor& inputs_TW) const {
  const model_config::DeltaShape& delta = layer_.shape.delta;
  return inputs_TW.narrow(1, delta.conv_width(), delta.value_width())
      .unflatten(1, {delta.value_heads, -1});
}

at::Tensor DeltaAttention::Run(const at::Tensor& inputs_TW, const Pass& pass,
                               LayerTape* tape, const KvAccess* kv) const {
  const ops::DeltaInputs inputs = RuleInputs(inputs_TW);
  if (kv == nullptr) {
    return ops::GatedDelta(inputs, Parameters(), pass.delta,
                           tape != nullptr ? &tape->delta : nullptr);
  }
  const ops::DeltaStates states = {
      .conv_NRW = kv->store->conv_NRW[layer_.index],
      .state_NHKV = kv->store->delta_NHKV[layer_.index],
      .slots_Q = kv->state_slots_Q,
      .padding_slot = kv->padding_state};
  if (kv->decode) return ops::GatedDeltaStep(inputs, Parameters(), states);
  return ops::GatedDeltaPrefill(inputs, Parameters(), pass.delta, states);
}

at::Tensor DeltaAttention::Normed(const at::Tensor& out_THV,
                                  const at::Tensor& inputs_TW) const {
  return ops::GatedRmsNorm(out_THV, OutputGates(inputs_TW),
                           layer_.weights.delta_norm_V,
                           layer_.config.rms_norm_eps)
      .flatten(1);
}

Stream DeltaAttention::Forward(Stream stream, const Pass& pass, LayerTape* tape,
                               KvAccess* kv) const {
  at::Tensor inputs_TW = ProjectInputs(layer_, stream, pass, tape);
  at::Tensor out_THV = Run(inputs_TW, pass, tape, kv);
  Stream mid = ProjectOutput(layer_, stream.x_TH, Normed(out_THV, inputs_TW),
                             pass, tape);
  if (tape != nullptr) {
    tape->qkv_TW = std::move(inputs_TW);
    tape->delta_out_THV = std::move(out_THV);
  }
  return mid;
}

void DeltaAttention::Backward(const BackwardPass& pass, LayerTape& tape,
                              at::Tensor& d_TH) const {
  const at::Tensor& out_THV = tape.delta_out_THV;
  const at::Tensor d_normed_TW = ProjectOutputBackward(
      layer_, d_TH, Normed(out_THV, tape.qkv_TW), pass, tape);
  const at::Tensor d_inputs_TW = at::empty_like(tape.qkv_TW);
  const at::Tensor d_out_THV = at::empty_like(out_THV);
  ops::GatedRmsNormBackward(
      d_normed_TW.view_as(out_THV), out_THV, OutputGates(tape.qkv_TW),
      layer_.weights.delta_norm_V, layer_.config.rms_norm_eps, d_out_THV,
      OutputGates(d_inputs_TW));
  ops::GatedDeltaBackward(d_out_THV, RuleInputs(tape.qkv_TW), Parameters(),
                          pass.delta, tape.delta, RuleInputs(d_inputs_TW));
  ProjectInputsBackward(layer_, d_inputs_TW, pass, tape, d_TH);
}

}  // namespace weft::model
