#include "src/moe/router.h"

#include <ATen/ATen.h>

#include <tuple>
#include <utility>

#include "src/ops/matmul.h"

namespace weft::moe {
namespace {

at::Tensor Logits(const at::Tensor& x_TH, const RouterWeights& weights) {
  at::Tensor logits_TE = ops::MatMul(x_TH, weights.router_EH.t());
  if (weights.bias_E.defined()) logits_TE.add_(weights.bias_E);
  return logits_TE;
}

at::Tensor Softmax(const at::Tensor& logits) {
  return at::softmax(
      logits, -1,
      logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Routes the tokens to known experts. `scores_TE` has logits if the softmax is
// that of the chosen, otherwise probabilities.
Routing WithWeights(const at::Tensor& scores_TE, at::Tensor experts_TK,
                    const model::MoeConfig& config, at::ScalarType dtype) {
  Routing routing{.experts_TK = std::move(experts_TK)};
  at::Tensor weights_TK = scores_TE.gather(1, routing.experts_TK);
  if (config.softmax_of_chosen) {
    weights_TK = Softmax(weights_TK);
    routing.probs = weights_TK;
  } else {
    routing.probs = scores_TE;
    if (config.normalizes_weights) {
      weights_TK = weights_TK / weights_TK.sum(1, /*keepdim=*/true);
    }
  }
  routing.weights_TK = weights_TK.to(dtype);
  return routing;
}

// Returns what WithWeights and the choice read.
at::Tensor Scores(const at::Tensor& x_TH, const RouterWeights& weights,
                  const model::MoeConfig& config) {
  at::Tensor logits_TE = Logits(x_TH, weights);
  return config.softmax_of_chosen ? logits_TE : Softmax(logits_TE);
}

// Returns dLoss/dlogits [T, E].
at::Tensor LogitsGradient(const at::Tensor& d_weights_TK,
                          const Routing& routing, int64_t num_experts,
                          const model::MoeConfig& config) {
  const at::Tensor& probs = routing.probs;
  at::Tensor d_chosen_TK = d_weights_TK.to(probs.scalar_type());
  const auto scatter = [&](const at::Tensor& d_TK) {
    return at::zeros({d_TK.size(0), num_experts}, d_TK.options())
        .scatter_(1, routing.experts_TK, d_TK);
  };
  if (config.softmax_of_chosen) {
    return scatter(at::_softmax_backward_data(d_chosen_TK, probs, /*dim=*/1,
                                              probs.scalar_type()));
  }
  if (config.normalizes_weights) {
    const at::Tensor chosen_TK = probs.gather(1, routing.experts_TK);
    const at::Tensor sum_T1 = chosen_TK.sum(1, /*keepdim=*/true);
    const at::Tensor mean_T1 =
        (d_chosen_TK * chosen_TK).sum(1, /*keepdim=*/true) / sum_T1;
    d_chosen_TK = (d_chosen_TK - mean_T1) / sum_T1;
  }
  return at::_softmax_backward_data(scatter(d_chosen_TK), probs, /*dim=*/1,
                                    probs.scalar_type());
}

}  // namespace

Routing Route(const at::Tensor& x_TH, const RouterWeights& weights,
              const model::MoeConfig& config, const at::Tensor& given_TK) {
  const at::Tensor scores_TE = Scores(x_TH, weights, config);
  at::Tensor experts_TK =
      std::get<1>(at::topk(scores_TE, config.shape.per_token, /*dim=*/1));
  if (given_TK.defined()) {
    experts_TK = at::where(given_TK.lt(0), experts_TK, given_TK);
  }
  return WithWeights(scores_TE, std::move(experts_TK), config,
                     x_TH.scalar_type());
}

Routing RouteTo(const at::Tensor& x_TH, const RouterWeights& weights,
                const model::MoeConfig& config, const at::Tensor& experts_TK) {
  return WithWeights(Scores(x_TH, weights, config), experts_TK, config,
                     x_TH.scalar_type());
}

at::Tensor RouteBackward(const at::Tensor& d_weights_TK, const Routing& routing,
                         const at::Tensor& router_EH,
                         const model::MoeConfig& config) {
  const at::Tensor d_logits_TE =
      LogitsGradient(d_weights_TK, routing, router_EH.size(0), config)
          .to(routing.weights_TK.scalar_type());
  return ops::MatMul(d_logits_TE, router_EH);
}

}  // namespace weft::moe
