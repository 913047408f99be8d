#include "src/model/expert_mlp.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "src/ops/gated_product.h"

namespace weft::moe {
namespace {

using lora::LoraSite;
using lora::ProjectionGroup;

// Returns the segments of all parts. Their row numbers count from the first row
// of the first part.
lora::ExpertRouting RoutingOf(const ExpertRows& rows) {
  lora::ExpertRouting routing;
  for (const ExpertPart& part : rows.parts) {
    for (lora::LoraSegment segment : part.routing) {
      segment.begin += part.begin;
      segment.end += part.begin;
      routing.segments.push_back(std::move(segment));
      routing.experts.push_back(part.expert);
    }
  }
  return routing;
}

// Returns where the rows of each of the rank's experts end.
std::vector<int64_t> EndsOf(const ExpertRows& rows,
                            const lora::ExpertShape& experts) {
  std::vector<int64_t> ends(experts.num_own());
  for (const ExpertPart& part : rows.parts) {
    ends[part.expert - experts.own.begin] = part.end;
  }
  // An expert without rows ends where the previous expert ends.
  for (size_t i = 1; i < ends.size(); ++i) {
    ends[i] = std::max(ends[i], ends[i - 1]);
  }
  return ends;
}

// The routing of a pass through all experts. It has no segments, because the
// pass has a table with the segments of all experts. If the table is null, no
// row has an adapter.
const lora::LoraRouting& NoSegments() {
  static const lora::LoraRouting kNone;
  return kNone;
}

}  // namespace

std::optional<AllExperts> AllAtOnce(const ExpertLayer& layer,
                                    const at::Tensor& x, const ExpertRows& rows,
                                    const lora::LoraGradients& gradients) {
  if (!x.is_cuda() || x.scalar_type() != at::kBFloat16 || rows.parts.empty()) {
    return std::nullopt;
  }
  const lora::ExpertRouting routing = RoutingOf(rows);
  lora::RoutingTablePtr table =
      lora::MakeExpertTable(routing, layer.layer, gradients, layer.shape,
                            x.scalar_type(), x.device());
  if (table == nullptr && !routing.segments.empty()) return std::nullopt;
  return AllExperts{
      .groups = ops::RowGroups(EndsOf(rows, layer.shape.experts), x.device()),
      .table = std::move(table)};
}

ExpertMlp::ExpertMlp(const ExpertLayer& layer, int expert,
                     const lora::LoraRouting& routing)
    : layer_(layer),
      expert_(expert),
      shape_(layer.shape.OfExpert(expert)),
      // The pass of one expert has no routing table on CUDA, because a table
      // has the segments of all experts.
      pass_{routing, shape_} {
  const ExpertWeights& w = layer.weights;
  if (expert == layer.shape.experts.count) {
    gate_up_.weight_OI = w.shared_gate_up_S2H;
    down_.weight_OI = w.shared_down_HS;
    return;
  }
  gate_up_.row_count = ops::RowCount::kVaries;
  down_.row_count = ops::RowCount::kVaries;
  const int64_t place = expert - layer.shape.experts.own.begin;
  const int64_t wide = 2 * shape_.ffn;
  gate_up_.weight_OI = w.gate_up_GH.narrow(0, place * wide, wide);
  down_.weight_OI = w.down_DF.narrow(0, place * shape_.hidden, shape_.hidden);
  if (w.gate_up_bias_G.defined()) {
    gate_up_.bias_O = w.gate_up_bias_G.narrow(0, place * wide, wide);
  }
  if (w.down_bias_D.defined()) {
    down_bias_PH_ = w.down_bias_D.view({-1, shape_.hidden}).narrow(0, place, 1);
  }
}

ExpertMlp::ExpertMlp(const ExpertLayer& layer, const AllExperts& all)
    : layer_(layer),
      expert_(lora::kNoExpert),
      shape_(layer.shape.OfExpert(/*expert=*/0)),
      pass_{.routing = NoSegments(), .shape = shape_, .table = all.table.get()},
      gate_up_{.weight_OI = layer.weights.gate_up_GH,
               .bias_O = layer.weights.gate_up_bias_G,
               .groups = &all.groups},
      down_{.weight_OI = layer.weights.down_DF, .groups = &all.groups} {
  const at::Tensor& bias_D = layer.weights.down_bias_D;
  if (bias_D.defined()) down_bias_PH_ = bias_D.view({-1, shape_.hidden});
}

at::Tensor ExpertMlp::Forward(const at::Tensor& x_nH,
                              const at::Tensor& weight_n1,
                              PartTape* tape) const {
  at::Tensor gate_up_n2F = GateUp(x_nH, tape);
  at::Tensor y_nH = LoraLinear(Activated(gate_up_n2F).mul_(weight_n1), down_,
                               pass_, Site(ProjectionGroup::kDown),
                               tape != nullptr ? &tape->shrunk_down : nullptr);
  AddDownBias(weight_n1, y_nH);
  if (tape != nullptr) tape->gate_up_n2F = std::move(gate_up_n2F);
  return y_nH;
}

void ExpertMlp::Recompute(const at::Tensor& x_nH, const at::Tensor& weight_n1,
                          PartTape& tape) const {
  tape.gate_up_n2F = GateUp(x_nH, &tape);
  tape.shrunk_down =
      lora::LoraShrink(Activated(tape.gate_up_n2F).mul_(weight_n1), down_,
                       pass_, Site(ProjectionGroup::kDown));
}

ExpertMlp::InputGradients ExpertMlp::Backward(
    const at::Tensor& dy_nH, const at::Tensor& x_nH,
    const at::Tensor& weight_n1, const lora::LoraGradients& gradients,
    PartTape tape) const {
  at::Tensor activated_nF = Activated(tape.gate_up_n2F);
  at::Tensor d_nF = lora::LoraLinearBackward(
      dy_nH, activated_nF * weight_n1, down_, pass_,
      Site(ProjectionGroup::kDown), tape.shrunk_down, gradients,
      /*want_input_gradient=*/true);
  InputGradients result{.weight_n = (d_nF * activated_nF).sum(1)};
  activated_nF.reset();
  AddDownBiasGradient(dy_nH, result.weight_n);
  d_nF.mul_(weight_n1);
  // GatedProductBackward replaces gate_up_n2F by the gradient of gate_up_n2F.
  ops::GatedProductBackward(layer_.config.activation, d_nF, tape.gate_up_n2F);
  d_nF.reset();
  result.x_nH = lora::LoraLinearBackward(tape.gate_up_n2F, x_nH, gate_up_,
                                         pass_, Site(ProjectionGroup::kGateUp),
                                         tape.shrunk_gate_up, gradients,
                                         /*want_input_gradient=*/true);
  return result;
}

LoraSite ExpertMlp::Site(ProjectionGroup group) const {
  // The table of all experts describes a one-layer model (expert_table.h), so
  // its layer is always 0.
  if (expert_ == lora::kNoExpert) return {.layer = 0, .group = group};
  return {.layer = layer_.layer, .group = group, .expert = expert_};
}

at::Tensor ExpertMlp::GateUp(const at::Tensor& x_nH, PartTape* tape) const {
  return LoraLinear(x_nH, gate_up_, pass_, Site(ProjectionGroup::kGateUp),
                    tape != nullptr ? &tape->shrunk_gate_up : nullptr);
}

at::Tensor ExpertMlp::Activated(const at::Tensor& gate_up_n2F) const {
  at::Tensor product_nF =
      at::empty({gate_up_n2F.size(0), shape_.ffn}, gate_up_n2F.options());
  ops::GatedProduct(layer_.config.activation, gate_up_n2F, product_nF);
  return product_nF;
}

void ExpertMlp::AddDownBias(const at::Tensor& weight_n1,
                            at::Tensor& y_nH) const {
  if (!down_bias_PH_.defined()) return;
  y_nH.addcmul_(weight_n1, down_.groups == nullptr
                               ? down_bias_PH_
                               : down_bias_PH_.index_select(
                                     0, down_.groups->GroupOfRows()));
}

void ExpertMlp::AddDownBiasGradient(const at::Tensor& dy_nH,
                                    at::Tensor& d_n) const {
  if (!down_bias_PH_.defined()) return;
  if (down_.groups == nullptr) {
    d_n.add_(at::mv(dy_nH, down_bias_PH_.squeeze(0)));
    return;
  }
  // Multiplies with the biases of all experts, because this product [n, P] is
  // smaller than a copy [n, H] of each row's bias.
  d_n.add_(at::mm(dy_nH, down_bias_PH_.t())
               .gather(1, down_.groups->GroupOfRows().unsqueeze(1))
               .squeeze(1));
}

}  // namespace weft::moe
