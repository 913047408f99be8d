#include "src/moe/experts.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <utility>

#include "src/moe/few_rows.h"
#include "src/ops/gated_product.h"

namespace weft::moe {
namespace {

using lora::BaseLinear;
using lora::LoraSite;
using lora::ProjectionGroup;

// Computes one expert of a layer on its n rows.
class Expert {
 public:
  // `routing` has the segments of the expert's rows, counted from the expert's
  // first row. `routing` and `layer` outlive the object.
  Expert(const ExpertLayer& layer, int expert, const lora::LoraRouting& routing)
      : layer_(layer),
        expert_(expert),
        shape_(layer.shape.OfExpert(expert)),
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
      down_bias_H_ =
          w.down_bias_D.narrow(0, place * shape_.hidden, shape_.hidden);
    }
  }
  Expert(const Expert&) = delete;
  Expert& operator=(const Expert&) = delete;

  // Returns the expert's output [n, H], multiplied by `weight_n1`.
  [[nodiscard]] at::Tensor Forward(const at::Tensor& x_nH,
                                   const at::Tensor& weight_n1,
                                   PartTape* tape) const {
    at::Tensor gate_up_n2F = GateUp(x_nH, tape);
    at::Tensor y_nH =
        LoraLinear(Activated(gate_up_n2F).mul_(weight_n1), down_, pass_,
                   Site(ProjectionGroup::kDown),
                   tape != nullptr ? &tape->shrunk_down : nullptr);
    if (down_bias_H_.defined()) y_nH.addcmul_(weight_n1, down_bias_H_);
    if (tape != nullptr) tape->gate_up_n2F = std::move(gate_up_n2F);
    return y_nH;
  }

  void Recompute(const at::Tensor& x_nH, const at::Tensor& weight_n1,
                 PartTape& tape) const {
    tape.gate_up_n2F = GateUp(x_nH, &tape);
    tape.shrunk_down =
        lora::LoraShrink(Activated(tape.gate_up_n2F).mul_(weight_n1), down_,
                         pass_, Site(ProjectionGroup::kDown));
  }

  struct InputGradients {
    at::Tensor x_nH;
    at::Tensor weight_n;
  };
  [[nodiscard]] InputGradients Backward(const at::Tensor& dy_nH,
                                        const at::Tensor& x_nH,
                                        const at::Tensor& weight_n1,
                                        const lora::LoraGradients& gradients,
                                        PartTape tape) const {
    const at::Tensor activated_nF = Activated(tape.gate_up_n2F);
    at::Tensor d_nF = lora::LoraLinearBackward(
        dy_nH, activated_nF * weight_n1, down_, pass_,
        Site(ProjectionGroup::kDown), tape.shrunk_down, gradients,
        /*want_input_gradient=*/true);
    InputGradients result{.weight_n = (d_nF * activated_nF).sum(1)};
    if (down_bias_H_.defined()) {
      result.weight_n.add_(at::mv(dy_nH, down_bias_H_));
    }
    d_nF.mul_(weight_n1);
    // GatedProductBackward replaces gate_up_n2F by the gradient of gate_up_n2F.
    ops::GatedProductBackward(layer_.config.activation, d_nF, tape.gate_up_n2F);
    result.x_nH = lora::LoraLinearBackward(
        tape.gate_up_n2F, x_nH, gate_up_, pass_, Site(ProjectionGroup::kGateUp),
        tape.shrunk_gate_up, gradients,
        /*want_input_gradient=*/true);
    return result;
  }

 private:
  [[nodiscard]] LoraSite Site(ProjectionGroup group) const {
    return {.layer = layer_.layer, .group = group, .expert = expert_};
  }

  [[nodiscard]] at::Tensor GateUp(const at::Tensor& x_nH,
                                  PartTape* tape) const {
    return LoraLinear(x_nH, gate_up_, pass_, Site(ProjectionGroup::kGateUp),
                      tape != nullptr ? &tape->shrunk_gate_up : nullptr);
  }

  [[nodiscard]] at::Tensor Activated(const at::Tensor& gate_up_n2F) const {
    at::Tensor product_nF =
        at::empty({gate_up_n2F.size(0), shape_.ffn}, gate_up_n2F.options());
    ops::GatedProduct(layer_.config.activation, gate_up_n2F, product_nF);
    return product_nF;
  }

  const ExpertLayer& layer_;
  const int expert_;
  const lora::ModelShape shape_;
  // The pass has no routing table on CUDA, because an upload for every expert
  // would cost more than a table saves.
  const lora::LoraPass pass_;
  BaseLinear gate_up_;
  BaseLinear down_;
  // The bias of down. It is not in down_, because the input of down_ is already
  // multiplied by the router's weight, and the bias is not.
  at::Tensor down_bias_H_;
};

// Returns whether the rows are on a CPU with at least one part for each thread.
bool HasPartPerThread(const ExpertRows& rows) {
  return rows.tokens_N.is_cpu() &&
         static_cast<int64_t>(rows.parts.size()) >= at::get_num_threads();
}

// Calls work(i) for every part. If a CPU has a part for each thread, every
// thread computes whole experts, because the products of one expert are small.
// A free thread takes the largest part that is left, so that all threads end at
// about the same time. LibTorch's grouped product is no alternative: on Zen 5
// it is half as fast (tests/bench/grouped.py), and an expert's LoRA and
// activation could not run between its products.
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
  std::atomic<size_t> next = 0;
  at::parallel_for(
      0, at::get_num_threads(), /*grain_size=*/1, [&](int64_t, int64_t) {
        const at::InferenceMode no_autograd;
        for (size_t place = next++; place < order.size(); place = next++) {
          work(order[place]);
        }
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
          .bias_E = layer.weights.router_bias_E};
}

bool HasShared(const ExpertLayer& layer) {
  return layer.shape.experts.shared_ffn > 0;
}

at::Tensor SharedWeight(const ExpertLayer& layer, const at::Tensor& x_TH) {
  return at::mm(x_TH, layer.weights.shared_gate_1H.to(x_TH.scalar_type()).t())
      .sigmoid_();
}

// Sets tape.routing, tape.rows and, if there is a shared expert,
// tape.shared_weight_T1. The argument `routing` has the batch's segments.
void Dispatch(const ExpertLayer& layer, const at::Tensor& x_TH,
              const lora::LoraRouting& routing, Routing experts,
              ExpertTape& tape) {
  tape.routing = std::move(experts);
  tape.rows =
      SortByExpert(tape.routing.experts_TK, layer.shape.experts, routing);
  if (HasShared(layer)) tape.shared_weight_T1 = SharedWeight(layer, x_TH);
}

}  // namespace

at::Tensor ForwardExperts(const ExpertLayer& layer, const at::Tensor& x_TH,
                          const lora::LoraRouting& routing,
                          at::Tensor& experts_TK, ExpertTape* tape) {
  ExpertTape passing;
  ExpertTape& own = tape != nullptr ? *tape : passing;
  Dispatch(layer, x_TH, routing,
           Route(x_TH, RouterOf(layer), layer.config.moe, experts_TK), own);
  experts_TK = own.routing.experts_TK;
  const ExpertRows& rows = own.rows;
  if (tape != nullptr) tape->parts.resize(rows.parts.size());
  const at::Tensor x_NH = GatherRows(x_TH, rows.tokens_N);
  const at::Tensor y_NH = ResultsOf(rows, x_NH);
  if (tape == nullptr && HasPartPerThread(rows) &&
      FewRowExperts::Take(x_NH, rows)) {
    const FewRowExperts few(layer, rows, own.routing.weights_TK, x_NH, y_NH);
    ForEachPart(rows, [&](size_t i) { few.Run(rows.parts[i]); });
  } else {
    const at::Tensor weights_N1 = WeightsOf(own.routing, rows);
    ForEachPart(rows, [&](size_t i) {
      const ExpertPart& part = rows.parts[i];
      RowsOf(y_NH, part)
          .copy_(Expert(layer, part.expert, part.routing)
                     .Forward(RowsOf(x_NH, part), RowsOf(weights_N1, part),
                              tape != nullptr ? &tape->parts[i] : nullptr));
    });
  }
  at::Tensor y_TH = SumOfRows(y_NH, rows.places_TK);
  if (HasShared(layer)) {
    y_TH.add_(Expert(layer, layer.shape.experts.count, routing)
                  .Forward(x_TH, own.shared_weight_T1,
                           tape != nullptr ? &tape->shared : nullptr));
  }
  return y_TH;
}

void RecomputeExperts(const ExpertLayer& layer, const at::Tensor& x_TH,
                      const lora::LoraRouting& routing,
                      const at::Tensor& experts_TK, ExpertTape& tape) {
  Dispatch(layer, x_TH, routing,
           RouteTo(x_TH, RouterOf(layer), layer.config.moe, experts_TK), tape);
  const ExpertRows& rows = tape.rows;
  tape.parts.resize(rows.parts.size());
  const at::Tensor x_NH = GatherRows(x_TH, rows.tokens_N);
  const at::Tensor weights_N1 = WeightsOf(tape.routing, rows);
  ForEachPart(rows, [&](size_t i) {
    const ExpertPart& part = rows.parts[i];
    Expert(layer, part.expert, part.routing)
        .Recompute(RowsOf(x_NH, part), RowsOf(weights_N1, part), tape.parts[i]);
  });
  if (HasShared(layer)) {
    Expert(layer, layer.shape.experts.count, routing)
        .Recompute(x_TH, tape.shared_weight_T1, tape.shared);
  }
}

at::Tensor BackwardExperts(const ExpertLayer& layer, const at::Tensor& dy_TH,
                           const at::Tensor& x_TH,
                           const lora::LoraRouting& routing,
                           const lora::LoraGradients& gradients,
                           ExpertTape& tape) {
  const ExpertRows& rows = tape.rows;
  const at::Tensor x_NH = GatherRows(x_TH, rows.tokens_N);
  const at::Tensor dy_NH = GatherRows(dy_TH, rows.tokens_N);
  const at::Tensor weights_N1 = WeightsOf(tape.routing, rows);
  const at::Tensor dx_NH = ResultsOf(rows, x_NH);
  const at::Tensor d_weights_N = ResultsOf(rows, weights_N1).squeeze(1);
  ForEachPart(rows, [&](size_t i) {
    const ExpertPart& part = rows.parts[i];
    const Expert::InputGradients d =
        Expert(layer, part.expert, part.routing)
            .Backward(RowsOf(dy_NH, part), RowsOf(x_NH, part),
                      RowsOf(weights_N1, part), gradients,
                      std::move(tape.parts[i]));
    RowsOf(dx_NH, part).copy_(d.x_nH);
    RowsOf(d_weights_N, part).copy_(d.weight_n);
  });
  at::Tensor dx_TH = SumOfRows(dx_NH, rows.places_TK);
  const at::Tensor d_weights_TK =
      d_weights_N.index_select(0, rows.places_TK.flatten())
          .view_as(rows.places_TK);
  dx_TH.add_(RouteBackward(d_weights_TK, tape.routing, layer.weights.router_EH,
                           layer.config.moe));
  if (HasShared(layer)) {
    const at::Tensor& weight_T1 = tape.shared_weight_T1;
    const Expert::InputGradients d =
        Expert(layer, layer.shape.experts.count, routing)
            .Backward(dy_TH, x_TH, weight_T1, gradients,
                      std::move(tape.shared));
    const at::Tensor d_gate_T1 =
        at::sigmoid_backward(d.weight_n.unsqueeze(1), weight_T1);
    dx_TH.add_(d.x_nH).add_(
        at::mm(d_gate_T1, layer.weights.shared_gate_1H.to(x_TH.scalar_type())));
  }
  tape = ExpertTape();
  return dx_TH;
}

}  // namespace weft::moe
