#include "src/model/few_row_experts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include "src/lora/lora_cpu.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/matmul.h"
#include "src/ops/pointwise.h"

namespace weft::model {

using lora::ProjectionGroup;

namespace {

int64_t NumRows(const ExpertPart& part) { return part.end - part.begin; }

const float* BiasOf(const at::Tensor& bias, int64_t first) {
  return bias.defined() ? bias.const_data_ptr<float>() + first : nullptr;
}

}  // namespace

bool FewRowExperts::Take(const ExpertLayer& layer, const at::Tensor& x_NH,
                         const ExpertRows& rows) {
  return ops::HasCpuKernel(x_NH) &&
         !ops::IsBf16Product(x_NH, layer.weights.gate_up_GH) &&
         std::ranges::all_of(rows.parts, [](const ExpertPart& part) {
           return NumRows(part) <= kernels::cpu::kFewRows;
         });
}

FewRowExperts::FewRowExperts(const ExpertLayer& layer, const ExpertRows& rows,
                             const at::Tensor& weights_TK,
                             const at::Tensor& x_NH, const at::Tensor& y_NH)
    : layer_(layer),
      shape_(layer.shape.OfExpert(/*expert=*/0)),
      gated_row_(ops::GatedRowOf(layer.config.activation)),
      scratch_N3F_(at::empty({x_NH.size(0), 3 * shape_.ffn}, x_NH.options())),
      pairs_(rows.pairs_N.const_data_ptr<int64_t>()),
      weights_(weights_TK.const_data_ptr<float>()),
      x_(x_NH.const_data_ptr<float>()),
      y_(y_NH.mutable_data_ptr<float>()) {}

void FewRowExperts::Run(const ExpertPart& part) const {
  float* gate_up_n2F =
      scratch_N3F_.mutable_data_ptr<float>() + part.begin * 3 * shape_.ffn;
  float* activated_nF = gate_up_n2F + NumRows(part) * 2 * shape_.ffn;
  GateUp(part, gate_up_n2F);
  Activate(part, gate_up_n2F, activated_nF);
  Down(part, activated_nF);
}

void FewRowExperts::GateUp(const ExpertPart& part, float* gate_up_n2F) const {
  const ExpertWeights& w = layer_.weights;
  const int64_t wide = 2 * shape_.ffn;
  const int64_t first = (part.expert - layer_.shape.experts.own.begin) * wide;
  const float* x_nH = x_ + part.begin * shape_.hidden;
  ops::RunRowProduct({.x_BI = x_nH,
                      .x_stride = shape_.hidden,
                      .num_rows = NumRows(part),
                      .num_inputs = shape_.hidden,
                      .weight_stride = w.gate_up_GH.stride(0),
                      .bias_O = BiasOf(w.gate_up_bias_G, first),
                      .y_BO = gate_up_n2F,
                      .y_stride = wide,
                      .end = wide},
                     w.gate_up_GH, first);
  lora::cpu::Add(x_nH, part.routing,
                 {.layer = layer_.layer,
                  .group = ProjectionGroup::kGateUp,
                  .expert = part.expert},
                 shape_, {gate_up_n2F, wide});
}

void FewRowExperts::Activate(const ExpertPart& part, const float* gate_up_n2F,
                             float* activated_nF) const {
  const int64_t ffn = shape_.ffn;
  for (int64_t row = 0; row < NumRows(part); ++row) {
    const float* gate = gate_up_n2F + row * 2 * ffn;
    float* activated = activated_nF + row * ffn;
    gated_row_(gate, gate + ffn, ffn, activated);
    const float weight = weights_[pairs_[part.begin + row]];
    for (int64_t i = 0; i < ffn; ++i) activated[i] *= weight;
  }
}

void FewRowExperts::Down(const ExpertPart& part,
                         const float* activated_nF) const {
  const ExpertWeights& w = layer_.weights;
  const int64_t hidden = shape_.hidden;
  const int64_t first = (part.expert - layer_.shape.experts.own.begin) * hidden;
  float* y_nH = y_ + part.begin * hidden;
  ops::RunRowProduct({.x_BI = activated_nF,
                      .x_stride = shape_.ffn,
                      .num_rows = NumRows(part),
                      .num_inputs = shape_.ffn,
                      .weight_stride = w.down_DF.stride(0),
                      .y_BO = y_nH,
                      .y_stride = hidden,
                      .end = hidden},
                     w.down_DF, first);
  lora::cpu::Add(activated_nF, part.routing,
                 {.layer = layer_.layer,
                  .group = ProjectionGroup::kDown,
                  .expert = part.expert},
                 shape_, {y_nH, hidden});
  const float* bias_H = BiasOf(w.down_bias_D, first);
  if (bias_H == nullptr) return;
  const auto weight = [&](int64_t row) {
    return weights_[pairs_[part.begin + row]];
  };
  ops::AddScaledRow(bias_H, weight, NumRows(part), hidden, y_nH);
}

}  // namespace weft::model
