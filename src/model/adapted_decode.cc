#include "src/model/adapted_decode.h"

#include <ATen/ATen.h>

#include <utility>

#include "src/base/profile.h"
#include "src/lora/lora_decode_cuda.h"
#include "src/model/attention.h"
#include "src/ops/matmul.h"

namespace weft::model {
namespace {

using lora::ProjectionGroup;
using lora::cuda::AddedRows;
using lora::cuda::ExpandGate;
using lora::cuda::ExpandHeads;
using lora::cuda::ExpandResidual;
using lora::cuda::GroupInput;
using lora::cuda::NextNorm;
using lora::cuda::ShrinkRows;

// Returns the base product plus `bias_O`. If the rows still lack their norm's
// factor, `bias_O` is undefined: the next launch applies the factor and then
// the bias.
at::Tensor Product(const GroupInput& in, const lora::BaseLinear& base,
                   const at::Tensor& bias_O) {
  return ops::Linear(in.rows_TI, base.weight_OI, bias_O, base.row_count);
}

// Returns the output of the heads [T, Q C].
at::Tensor Attend(const Layer& layer, const GroupInput& in, const Pass& pass,
                  const KvAccess& kv) {
  const lora::BaseLinear& base = layer.weights.qkv;
  const Attention attention(layer);
  const at::Tensor qkv_TW = Product(in, base, /*bias_O=*/{});
  const ops::Heads heads = attention.SplitHeads(qkv_TW);
  const ops::KvSlots slots = attention.SlotsOf(kv);
  ExpandHeads(in, *pass.lora.table, layer.index, base.bias_O, heads,
              pass.batch.positions_T, layer.rotary, attention.HeadNorms(),
              slots);
  return attention.AttendToPages(heads.q_TQC, slots, kv)
      .view({qkv_TW.size(0), layer.shape.q_width});
}

// Runs a layer. stream.next is the input of the layer's q, k and v. Returns the
// residual stream after the layer, and the input of next.site, which is the
// stream after the norm `next`.
AddedRows RunLayer(const Layer& layer, AddedRows stream, const Pass& pass,
                   const KvAccess& kv, const NextNorm& next) {
  const profile::Span span("layer forward", "layer", layer.index);
  const LayerWeights& w = layer.weights;
  const lora::cuda::RoutingTable& table = *pass.lora.table;
  const auto site = [&](ProjectionGroup group) {
    return lora::LoraSite{layer.index, group};
  };
  const GroupInput o = ShrinkRows(Attend(layer, stream.next, pass, kv), table,
                                  site(ProjectionGroup::kO));
  const AddedRows mid = ExpandResidual(o, table, site(ProjectionGroup::kO),
                                       stream.x_TH, Product(o, w.o, w.o.bias_O),
                                       {w.mlp_norm_H, layer.config.rms_norm_eps,
                                        site(ProjectionGroup::kGateUp)});
  const GroupInput down = ExpandGate(
      mid.next, table, layer.index, w.gate_up.bias_O, layer.config.activation,
      Product(mid.next, w.gate_up, /*bias_O=*/{}));
  return ExpandResidual(down, table, site(ProjectionGroup::kDown), mid.x_TH,
                        Product(down, w.down, w.down.bias_O), next);
}

}  // namespace

bool TakesAdaptedDecode(const Layer& layer, const Pass& pass,
                        const KvAccess* kv) {
  const ModelConfig& config = layer.config;
  return kv != nullptr && kv->decode && pass.lora.table != nullptr &&
         layer.tensor_group == nullptr && !config.output_norms &&
         layer.shape.experts.count == 0 &&
         TakesDecode(*pass.lora.table, pass.batch.tokens_T.size(0),
                     config.head_dim);
}

at::Tensor DecodeAdapted(at::Tensor x_TH, const at::Tensor& normed_TH,
                         const Pass& pass, const KvAccess& kv,
                         const std::function<Layer(int index)>& layer_at) {
  const int num_layers = static_cast<int>(pass.lora.shape.num_layers);
  const auto norm_of = [&](int index) -> NextNorm {
    if (index == num_layers) return {};
    const Layer layer = layer_at(index);
    return {layer.weights.input_norm_H,
            layer.config.rms_norm_eps,
            {index, ProjectionGroup::kQkv}};
  };
  AddedRows stream = {
      .x_TH = std::move(x_TH),
      .next = ShrinkRows(normed_TH, *pass.lora.table, norm_of(0).site)};
  for (int index = 0; index < num_layers; ++index) {
    stream = RunLayer(layer_at(index), std::move(stream), pass, kv,
                      norm_of(index + 1));
  }
  return stream.x_TH;
}

}  // namespace weft::model
