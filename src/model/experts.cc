#include "src/model/experts.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <utility>

#include "src/model/expert_mlp.h"
#include "src/model/few_rows.h"

namespace weft::moe {
namespace {

// Returns whether the rows are on a CPU with at least one part for each thread.
bool HasPartPerThread(const ExpertRows& rows) {
  return rows.tokens_N.is_cpu() &&
         static_cast<int64_t>(rows.parts.size()) >= at::get_num_threads();
}

// Calls work(i) for every part. If HasPartPerThread(rows), every thread
// computes whole experts, because the products of one expert are small. A free
// thread takes the largest part that is left, so that all threads end at about
// the same time. LibTorch's grouped product is no alternative: on Zen 5 it is
// half as fast (tests/bench/grouped.py), and an expert's LoRA and activation
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
                      ExpertTape& tape, bool keeps) {
  const ExpertRows& rows = tape.rows;
  const at::Tensor x_NH = GatherRows(x_TH, rows.tokens_N);
  if (const auto all = AllAtOnce(layer, x_NH, rows, /*gradients=*/{})) {
    if (keeps) tape.parts.resize(1);
    return WithAbsent(rows, ExpertMlp(layer, *all)
                                .Forward(x_NH, WeightsOf(tape.routing, rows),
                                         keeps ? tape.parts.data() : nullptr));
  }
  if (keeps) tape.parts.resize(rows.parts.size());
  at::Tensor y_NH = ResultsOf(rows, x_NH);
  if (!keeps && HasPartPerThread(rows) && FewRowExperts::Take(x_NH, rows)) {
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

at::Tensor ForwardExperts(const ExpertLayer& layer, const at::Tensor& x_TH,
                          const lora::LoraRouting& routing,
                          at::Tensor& experts_TK, ExpertTape* tape) {
  ExpertTape passing;
  ExpertTape& own = tape != nullptr ? *tape : passing;
  Dispatch(layer, x_TH, routing,
           Route(x_TH, RouterOf(layer), layer.config.moe, experts_TK), own);
  experts_TK = own.routing.experts_TK;
  at::Tensor y_TH = SumOfRows(RowOutputs(layer, x_TH, own, tape != nullptr),
                              own.rows.places_TK);
  if (HasShared(layer)) {
    y_TH.add_(ExpertMlp(layer, layer.shape.experts.count, routing)
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
  RecomputeRows(layer, x_TH, tape);
  if (HasShared(layer)) {
    ExpertMlp(layer, layer.shape.experts.count, routing)
        .Recompute(x_TH, tape.shared_weight_T1, tape.shared);
  }
}

at::Tensor BackwardExperts(const ExpertLayer& layer, const at::Tensor& dy_TH,
                           const at::Tensor& x_TH,
                           const lora::LoraRouting& routing,
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
        ExpertMlp(layer, layer.shape.experts.count, routing)
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
