#include "src/model/experts.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "src/model/few_row_experts.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/gated_product.h"
#include "src/ops/grouped_matmul.h"
#include "src/ops/matmul.h"
#include "src/ops/pointwise.h"
#include "src/ops/thread_team.h"

namespace weft::model {
namespace {

using lora::LoraSite;
using lora::ProjectionGroup;

// What a pass through all experts at once needs besides the rows.
//
// On CUDA in bf16, the routed experts are computed at once. The base products
// are the grouped products of ops/grouped_matmul.h. The adapters' products take
// a table of experts (lora/lora_cuda.h). All other operations run on all rows.
// If the device has LibTorch's grouped product, the number of launches does not
// grow with the number of experts. One expert after another would take so many
// launches that the device would wait for the host.
struct AllExperts {
  ops::RowGroups groups;        // A group for each expert that the rank has.
  lora::RoutingTablePtr table;  // Null if no row has an adapter.
};

// The MLP of one expert, or of all experts of a layer at once, on n sorted
// rows. The arguments of the constructors outlive the object. Threads: on a
// CPU, any thread, if no other thread runs the same expert; on CUDA, the engine
// thread.
class ExpertMlp {
 public:
  // The MLP of one expert. `routing` has the segments of the expert's rows,
  // counted from the expert's first row. If `expert` is the layer's number of
  // experts, it is the shared expert, which has all rows. Only the shared
  // expert has a table, that of the pass, because another expert's rows are
  // those of a part.
  ExpertMlp(const ExpertLayer& layer, int expert,
            const lora::LoraRouting& routing,
            const lora::cuda::RoutingTable* table = nullptr);
  // The MLPs of all experts that the rank has, without the shared one.
  ExpertMlp(const ExpertLayer& layer, const AllExperts& all);

  // Returns the output [n, H], multiplied by the router's weights.
  // Shapes:  x_nH [n, H] contiguous, weight_n1 [n, 1]. `tape` may be null.
  at::Tensor Forward(const at::Tensor& x_nH, const at::Tensor& weight_n1,
                     PartTape* tape) const;
  // Fills the tape as Forward does, but skips the product by `down`.
  void Recompute(const at::Tensor& x_nH, const at::Tensor& weight_n1,
                 PartTape& tape) const;

  // dLoss/dx and dLoss/dweight.
  struct InputGradients {
    at::Tensor x_nH;
    at::Tensor weight_n;
  };
  // Adds the adapters' gradients to `gradients`. If the object has all experts,
  // AllAtOnce must have been called with the same `gradients`.
  InputGradients Backward(const at::Tensor& dy_nH, const at::Tensor& x_nH,
                          const at::Tensor& weight_n1,
                          const lora::LoraGradients& gradients,
                          PartTape tape) const;

 private:
  lora::LoraSite Site(lora::ProjectionGroup group) const;
  at::Tensor GateUp(const at::Tensor& x_nH, PartTape* tape) const;
  // Add what the bias of `down` contributes to the output and to dLoss/dweight.
  void AddDownBias(const at::Tensor& weight_n1, at::Tensor& y_nH) const;
  void AddDownBiasGradient(const at::Tensor& dy_nH, at::Tensor& d_n) const;

  const ExpertLayer& layer_;
  const int expert_;  // kNoExpert for all experts.
  const model_config::ModelShape shape_;
  const lora::LoraPass pass_;
  lora::BaseLinear gate_up_;
  lora::BaseLinear down_;
  // The biases of down, one row for each expert; undefined if there are none.
  // They are not in down_, because down_ would add them without the router's
  // weight, which multiplies the input of down_.
  at::Tensor down_bias_PH_;
};

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
                            const model_config::ExpertShape& experts) {
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

// Returns all experts for rows that are sorted on the device.
AllExperts SortedOnDevice(const ExpertLayer& layer, const lora::LoraPass& pass,
                          const ExpertTape& tape) {
  const ExpertRows& rows = tape.rows;
  return {.groups = ops::RowGroups(rows.ends_E, rows.pairs_N.size(0)),
          .table = lora::FindExpertRows(pass, layer.layer,
                                        tape.routing.experts_TK, rows.pairs_N)};
}

// Returns nullopt if each expert must be computed by itself: if `x` is not bf16
// on CUDA, if an adapter's weights are not bf16, if there are no rows, or if
// the table cannot have all segments (FitsExpertTable). Otherwise queues
// uploads and does not wait. `gradients` is empty in a forward pass, and its
// tensors outlive the result.
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
                     const lora::LoraRouting& routing,
                     const lora::cuda::RoutingTable* table)
    : layer_(layer),
      expert_(expert),
      shape_(layer.shape.OfExpert(expert)),
      pass_{routing, shape_, table} {
  const ExpertWeights& w = layer.weights;
  if (expert == layer.shape.experts.count) {
    gate_up_.weight_OI = w.shared_gate_up_S2H;
    down_.weight_OI = w.shared_down_HS;
    return;
  }
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
  at::Tensor y_nH = LoraLinear(
      ops::GatedProduct(layer_.config.activation, gate_up_n2F).mul_(weight_n1),
      down_, pass_, Site(ProjectionGroup::kDown),
      tape != nullptr ? &tape->shrunk_down : nullptr);
  AddDownBias(weight_n1, y_nH);
  if (tape != nullptr) tape->gate_up_n2F = std::move(gate_up_n2F);
  return y_nH;
}

void ExpertMlp::Recompute(const at::Tensor& x_nH, const at::Tensor& weight_n1,
                          PartTape& tape) const {
  tape.gate_up_n2F = GateUp(x_nH, &tape);
  tape.shrunk_down = lora::LoraShrink(
      ops::GatedProduct(layer_.config.activation, tape.gate_up_n2F)
          .mul_(weight_n1),
      down_, pass_, Site(ProjectionGroup::kDown));
}

ExpertMlp::InputGradients ExpertMlp::Backward(
    const at::Tensor& dy_nH, const at::Tensor& x_nH,
    const at::Tensor& weight_n1, const lora::LoraGradients& gradients,
    PartTape tape) const {
  at::Tensor activated_nF =
      ops::GatedProduct(layer_.config.activation, tape.gate_up_n2F);
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
  // The table of all experts describes a one-layer model (lora_cuda.h), so
  // its layer is always 0.
  if (expert_ == lora::kNoExpert) return {.layer = 0, .group = group};
  return {.layer = layer_.layer, .group = group, .expert = expert_};
}

at::Tensor ExpertMlp::GateUp(const at::Tensor& x_nH, PartTape* tape) const {
  return LoraLinear(x_nH, gate_up_, pass_, Site(ProjectionGroup::kGateUp),
                    tape != nullptr ? &tape->shrunk_gate_up : nullptr);
}

void ExpertMlp::AddDownBias(const at::Tensor& weight_n1,
                            at::Tensor& y_nH) const {
  if (!down_bias_PH_.defined()) return;
  if (ops::HasCpuKernel(y_nH)) {
    const float* const weights = weight_n1.const_data_ptr<float>();
    const int64_t stride = weight_n1.stride(0);
    return ops::AddScaledRow(
        down_bias_PH_.const_data_ptr<float>(),
        [&](int64_t r) { return weights[r * stride]; }, y_nH.size(0),
        y_nH.size(1), y_nH.mutable_data_ptr<float>());
  }
  y_nH.addcmul_(weight_n1, down_.groups == nullptr
                               ? down_bias_PH_
                               : down_bias_PH_.index_select(
                                     0, down_.groups->GroupOfRows()));
}

void ExpertMlp::AddDownBiasGradient(const at::Tensor& dy_nH,
                                    at::Tensor& d_n) const {
  if (!down_bias_PH_.defined()) return;
  if (down_.groups == nullptr) {
    d_n.add_(ops::Linear(dy_nH, down_bias_PH_).squeeze(1));
    return;
  }
  // Multiplies with the biases of all experts, because this product [n, P] is
  // smaller than a copy [n, H] of each row's bias.
  d_n.add_(at::mm(dy_nH, down_bias_PH_.t())
               .gather(1, down_.groups->GroupOfRows().unsqueeze(1))
               .squeeze(1));
}

// Returns whether the rows are on a CPU with at least one part for each thread.
bool HasPartPerThread(const ExpertRows& rows) {
  return rows.tokens_N.is_cpu() &&
         static_cast<int64_t>(rows.parts.size()) >= at::get_num_threads();
}

// Calls work(i) for every part. If HasPartPerThread(rows), every thread
// computes whole experts, because the products of one expert are small. A free
// thread takes the largest part that is left, so that all threads end at about
// the same time. LibTorch's grouped product is no alternative: on Zen 5 it is
// half as fast (tests/bench/op.py grouped), and an expert's LoRA and activation
// could not run between its products.
void ForEachPart(const ExpertRows& rows,
                 const std::function<void(size_t)>& work) {
  const std::vector<ExpertPart>& parts = rows.parts;
  if (!HasPartPerThread(rows)) {
    for (size_t i = 0; i < parts.size(); ++i) work(i);
    return;
  }
  std::vector<size_t> order(parts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater(), [&parts](size_t i) {
    return parts[i].end - parts[i].begin;
  });
  ops::ForEachTask(std::ssize(order), [&](int64_t, int64_t place) {
    const at::InferenceMode no_autograd;
    work(order[place]);
  });
}

at::Tensor RowsOf(const at::Tensor& tensor, const ExpertPart& part) {
  return tensor.narrow(0, part.begin, part.end - part.begin);
}

// Returns memory for one result of each row. If tokens have experts of other
// ranks, one more result follows. It is zero and stands for all those experts.
at::Tensor ResultsOf(const ExpertRows& rows, const at::Tensor& like) {
  if (!rows.has_absent) return at::empty_like(like);
  std::vector<int64_t> shape = like.sizes().vec();
  ++shape[0];
  at::Tensor results = at::empty(shape, like.options());
  results.select(0, shape[0] - 1).zero_();
  return results;
}

// Returns the router's weights of the sorted rows, [N, 1].
at::Tensor WeightsOf(const Routing& routing, const ExpertRows& rows) {
  return routing.weights_TK.flatten()
      .index_select(0, rows.pairs_N)
      .unsqueeze(1);
}

RouterWeights RouterOf(const ExpertLayer& layer) {
  return {.router_EH = layer.weights.router_EH,
          .bias_E = layer.weights.router_bias_E,
          .correction_E = layer.weights.router_correction_E};
}

bool HasShared(const ExpertLayer& layer) {
  return layer.shape.experts.shared_ffn > 0;
}

ExpertMlp SharedMlp(const ExpertLayer& layer, const lora::LoraPass& pass) {
  return {layer, layer.shape.experts.count, pass.routing, pass.table};
}

// Sets tape.routing, tape.rows and, if there is a shared expert,
// tape.shared_weight_T1. The argument `routing` has the batch's segments. The
// rows are sorted on the host, or on the device if `on_device` is true.
void Dispatch(const ExpertLayer& layer, const at::Tensor& x_TH,
              const lora::LoraRouting& routing, Routing experts, bool on_device,
              ExpertTape& tape) {
  tape.routing = std::move(experts);
  const at::Tensor& experts_TK = tape.routing.experts_TK;
  tape.rows = on_device
                  ? SortOnDevice(experts_TK, layer.shape.experts.count)
                  : SortByExpert(experts_TK, layer.shape.experts, routing);
  if (!HasShared(layer)) return;
  tape.shared_weight_T1 = SharedWeight(x_TH, layer.weights.shared_gate_1H);
}

// If tokens have experts of other ranks, appends a zero result, as ResultsOf
// does.
at::Tensor WithAbsent(const ExpertRows& rows, at::Tensor results) {
  if (!rows.has_absent) return results;
  return at::cat({results, at::zeros_like(results.narrow(0, 0, 1))});
}

// Returns the outputs of the sorted rows, multiplied by the router's weights.
// Like ResultsOf, appends a zero result if tokens have experts of other ranks.
// Fills tape.parts if `keeps` is true.
at::Tensor RowOutputs(const ExpertLayer& layer, const at::Tensor& x_TH,
                      const lora::LoraPass& pass, ExpertTape& tape,
                      bool keeps) {
  const ExpertRows& rows = tape.rows;
  const at::Tensor x_NH = GatherRows(x_TH, rows.tokens_N);
  const std::optional<AllExperts> all =
      rows.ends_E.defined() ? SortedOnDevice(layer, pass, tape)
                            : AllAtOnce(layer, x_NH, rows, /*gradients=*/{});
  if (all) {
    if (keeps) tape.parts.resize(1);
    return WithAbsent(rows, ExpertMlp(layer, *all)
                                .Forward(x_NH, WeightsOf(tape.routing, rows),
                                         keeps ? tape.parts.data() : nullptr));
  }
  if (keeps) tape.parts.resize(rows.parts.size());
  at::Tensor y_NH = ResultsOf(rows, x_NH);
  if (!keeps && HasPartPerThread(rows) &&
      FewRowExperts::Take(layer, x_NH, rows)) {
    const FewRowExperts few(layer, rows, tape.routing.weights_TK, x_NH, y_NH);
    ForEachPart(rows, [&](size_t i) { few.Run(rows.parts[i]); });
    return y_NH;
  }
  const at::Tensor weights_N1 = WeightsOf(tape.routing, rows);
  ForEachPart(rows, [&](size_t i) {
    const ExpertPart& part = rows.parts[i];
    RowsOf(y_NH, part)
        .copy_(ExpertMlp(layer, part.expert, part.routing)
                   .Forward(RowsOf(x_NH, part), RowsOf(weights_N1, part),
                            keeps ? &tape.parts[i] : nullptr));
  });
  return y_NH;
}

// Fills tape.parts.
void RecomputeRows(const ExpertLayer& layer, const at::Tensor& x_TH,
                   ExpertTape& tape) {
  const ExpertRows& rows = tape.rows;
  const at::Tensor x_NH = GatherRows(x_TH, rows.tokens_N);
  const at::Tensor weights_N1 = WeightsOf(tape.routing, rows);
  if (const auto all = AllAtOnce(layer, x_NH, rows, /*gradients=*/{})) {
    tape.parts.resize(1);
    ExpertMlp(layer, *all).Recompute(x_NH, weights_N1, tape.parts[0]);
    return;
  }
  tape.parts.resize(rows.parts.size());
  ForEachPart(rows, [&](size_t i) {
    const ExpertPart& part = rows.parts[i];
    ExpertMlp(layer, part.expert, part.routing)
        .Recompute(RowsOf(x_NH, part), RowsOf(weights_N1, part), tape.parts[i]);
  });
}

// Returns the gradients of the sorted rows' inputs and weights. Like ResultsOf,
// appends a zero to both if tokens have experts of other ranks. Adds to
// `gradients`. Consumes tape.parts.
ExpertMlp::InputGradients RowGradients(const ExpertLayer& layer,
                                       const at::Tensor& dy_TH,
                                       const at::Tensor& x_TH,
                                       const lora::LoraGradients& gradients,
                                       ExpertTape& tape) {
  const ExpertRows& rows = tape.rows;
  at::Tensor x_NH = GatherRows(x_TH, rows.tokens_N);
  at::Tensor dy_NH = GatherRows(dy_TH, rows.tokens_N);
  const at::Tensor weights_N1 = WeightsOf(tape.routing, rows);
  const auto all = AllAtOnce(layer, x_NH, rows, gradients);
  TORCH_CHECK(tape.parts.size() == (all ? 1 : rows.parts.size()),
              "the tape has ", tape.parts.size(), " parts of experts");
  if (all) {
    ExpertMlp::InputGradients d =
        ExpertMlp(layer, *all)
            .Backward(dy_NH, x_NH, weights_N1, gradients,
                      std::move(tape.parts[0]));
    // Frees memory for the copy that WithAbsent may make.
    x_NH.reset();
    dy_NH.reset();
    return {.x_nH = WithAbsent(rows, std::move(d.x_nH)),
            .weight_n = WithAbsent(rows, std::move(d.weight_n))};
  }
  const at::Tensor dx_NH = ResultsOf(rows, x_NH);
  const at::Tensor d_weights_N = ResultsOf(rows, weights_N1).squeeze(1);
  ForEachPart(rows, [&](size_t i) {
    const ExpertPart& part = rows.parts[i];
    const ExpertMlp::InputGradients d =
        ExpertMlp(layer, part.expert, part.routing)
            .Backward(RowsOf(dy_NH, part), RowsOf(x_NH, part),
                      RowsOf(weights_N1, part), gradients,
                      std::move(tape.parts[i]));
    RowsOf(dx_NH, part).copy_(d.x_nH);
    RowsOf(d_weights_N, part).copy_(d.weight_n);
  });
  return {.x_nH = dx_NH, .weight_n = d_weights_N};
}

}  // namespace

bool SortsOnDevice(const ExpertLayer& layer) {
  const model_config::ExpertShape& experts = layer.shape.experts;
  return experts.num_own() == experts.count &&
         ops::TakesGroupedProduct(layer.weights.gate_up_GH, experts.count) &&
         ops::TakesGroupedProduct(layer.weights.down_DF, experts.count);
}

at::Tensor ForwardExperts(const ExpertLayer& layer, const at::Tensor& x_TH,
                          const lora::LoraPass& pass, at::Tensor& experts_TK,
                          ExpertTape* tape) {
  ExpertTape passing;
  ExpertTape& own = tape != nullptr ? *tape : passing;
  // Only the sort on the host checks the experts that a caller gives.
  const bool on_device = tape == nullptr && !experts_TK.defined() &&
                         SortsOnDevice(layer) && lora::FindsExpertRows(pass);
  Dispatch(layer, x_TH, pass.routing,
           Route(x_TH, RouterOf(layer), layer.config.moe, experts_TK),
           on_device, own);
  experts_TK = own.routing.experts_TK;
  at::Tensor y_TH = SumOfRows(
      RowOutputs(layer, x_TH, pass, own, tape != nullptr), own.rows.places_TK);
  if (HasShared(layer)) {
    y_TH.add_(SharedMlp(layer, pass)
                  .Forward(x_TH, own.shared_weight_T1,
                           tape != nullptr ? &tape->shared : nullptr));
  }
  return y_TH;
}

void RecomputeExperts(const ExpertLayer& layer, const at::Tensor& x_TH,
                      const lora::LoraPass& pass, const at::Tensor& experts_TK,
                      ExpertTape& tape) {
  Dispatch(layer, x_TH, pass.routing,
           Route(x_TH, RouterOf(layer), layer.config.moe, experts_TK,
                 /*all_given=*/true),
           /*on_device=*/false, tape);
  RecomputeRows(layer, x_TH, tape);
  if (HasShared(layer)) {
    SharedMlp(layer, pass).Recompute(x_TH, tape.shared_weight_T1, tape.shared);
  }
}

at::Tensor BackwardExperts(const ExpertLayer& layer, const at::Tensor& dy_TH,
                           const at::Tensor& x_TH, const lora::LoraPass& pass,
                           const lora::LoraGradients& gradients,
                           ExpertTape& tape) {
  const ExpertMlp::InputGradients d_N =
      RowGradients(layer, dy_TH, x_TH, gradients, tape);
  const at::Tensor& places_TK = tape.rows.places_TK;
  at::Tensor dx_TH = SumOfRows(d_N.x_nH, places_TK);
  const at::Tensor d_weights_TK =
      d_N.weight_n.index_select(0, places_TK.flatten()).view_as(places_TK);
  dx_TH.add_(RouteBackward(d_weights_TK, tape.routing, layer.weights.router_EH,
                           layer.config.moe));
  if (HasShared(layer)) {
    const at::Tensor& weight_T1 = tape.shared_weight_T1;
    const ExpertMlp::InputGradients d =
        SharedMlp(layer, pass)
            .Backward(dy_TH, x_TH, weight_T1, gradients,
                      std::move(tape.shared));
    dx_TH.add_(d.x_nH);
    SharedWeightBackward(d.weight_n, weight_T1, layer.weights.shared_gate_1H,
                         dx_TH);
  }
  tape = ExpertTape();
  return dx_TH;
}

}  // namespace weft::model
