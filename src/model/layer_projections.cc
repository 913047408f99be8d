#include "src/model/layer_projections.h"

#include <utility>

#include "src/lora/lora_embedding.h"
#include "src/lora/lora_linear.h"

namespace weft::model {

using lora::LoraLinear;
using lora::LoraLinearBackward;

at::Tensor ProjectInputs(const Layer& layer, Stream& stream, const Pass& pass,
                         LayerTape* tape) {
  at::Tensor inputs_TW = LoraLinear(
      stream.normed_TH, layer.weights.qkv, pass.lora, layer.InputSite(),
      tape != nullptr ? &tape->shrunk_qkv : nullptr);
  stream.normed_TH.reset();
  return inputs_TW;
}

void ProjectInputsBackward(const Layer& layer, const at::Tensor& d_inputs_TW,
                           const BackwardPass& pass, const LayerTape& tape,
                           at::Tensor& d_TH) {
  const LayerWeights& w = layer.weights;
  const double eps = layer.config.rms_norm_eps;
  // Only an adapter of the embedding needs the first layer's input gradient.
  const bool want_input_gradient =
      layer.index > 0 || lora::TrainsEmbedding(pass.gradients);
  at::Tensor d_normed_TH = LoraLinearBackward(
      d_inputs_TW, Norm(tape.x_in_TH, w.input_norm_H, eps), w.qkv, pass.lora,
      layer.InputSite(), tape.shrunk_qkv, pass.gradients, want_input_gradient);
  if (want_input_gradient) {
    SumOverRanks(layer.tensor_group, d_normed_TH);
    NormBackward(d_normed_TH, tape.x_in_TH, w.input_norm_H, eps, d_TH);
  }
}

Stream ProjectOutput(const Layer& layer, const at::Tensor& x_TH,
                     const at::Tensor& attended_TW, const Pass& pass,
                     LayerTape* tape) {
  const LayerWeights& w = layer.weights;
  at::Tensor o_TH = LoraLinear(attended_TW, w.o, pass.lora, layer.OutputSite(),
                               tape != nullptr ? &tape->shrunk_o : nullptr);
  SumOverRanks(layer.tensor_group, o_TH);
  return AddOutput(x_TH, std::move(o_TH), w.attention_out_norm_H, w.mlp_norm_H,
                   layer.config.rms_norm_eps,
                   tape != nullptr ? &tape->attention_raw_TH : nullptr);
}

at::Tensor ProjectOutputBackward(const Layer& layer, const at::Tensor& d_TH,
                                 const at::Tensor& attended_TW,
                                 const BackwardPass& pass,
                                 const LayerTape& tape) {
  const LayerWeights& w = layer.weights;
  return LoraLinearBackward(
      AddOutputBackward(d_TH, w.attention_out_norm_H, layer.config.rms_norm_eps,
                        tape.attention_raw_TH),
      attended_TW, w.o, pass.lora, layer.OutputSite(), tape.shrunk_o,
      pass.gradients, /*want_input_gradient=*/true);
}

}  // namespace weft::model
