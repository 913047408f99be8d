#include "src/moe/router.h"

#include <ATen/ATen.h>

#include <tuple>
#include <utility>

#include "src/ops/matmul.h"

namespace weft::moe {
namespace {

at::Tensor Probabilities(const at::Tensor& x_TH, const at::Tensor& router_EH) {
  const at::Tensor logits_TE = ops::MatMul(x_TH, router_EH.t());
  return at::softmax(
      logits_TE, -1,
      logits_TE.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Adds the weights of the experts, in `dtype`. `weights_TK` has their
// probabilities.
Routing WithWeights(Routing routing, at::Tensor weights_TK,
                    const model::MoeConfig& config, at::ScalarType dtype) {
  if (config.normalizes_weights) {
    weights_TK = weights_TK / weights_TK.sum(1, /*keepdim=*/true);
  }
  routing.weights_TK = weights_TK.to(dtype);
  return routing;
}

}  // namespace

Routing Route(const at::Tensor& x_TH, const at::Tensor& router_EH,
              const model::MoeConfig& config, const at::Tensor& given_TK) {
  Routing routing{.probs_TE = Probabilities(x_TH, router_EH)};
  at::Tensor weights_TK;
  std::tie(weights_TK, routing.experts_TK) =
      at::topk(routing.probs_TE, config.shape.per_token, /*dim=*/1);
  if (given_TK.defined()) {
    routing.experts_TK =
        at::where(given_TK.lt(0), routing.experts_TK, given_TK);
    weights_TK = routing.probs_TE.gather(1, routing.experts_TK);
  }
  return WithWeights(std::move(routing), std::move(weights_TK), config,
                     x_TH.scalar_type());
}

Routing RouteTo(const at::Tensor& x_TH, const at::Tensor& router_EH,
                const model::MoeConfig& config, const at::Tensor& experts_TK) {
  Routing routing{.experts_TK = experts_TK,
                  .probs_TE = Probabilities(x_TH, router_EH)};
  at::Tensor weights_TK = routing.probs_TE.gather(1, experts_TK);
  return WithWeights(std::move(routing), std::move(weights_TK), config,
                     x_TH.scalar_type());
}

at::Tensor RouteBackward(const at::Tensor& d_weights_TK, const Routing& routing,
                         const at::Tensor& router_EH,
                         const model::MoeConfig& config) {
  const at::Tensor& probs_TE = routing.probs_TE;
  at::Tensor d_chosen_TK = d_weights_TK.to(probs_TE.scalar_type());
  if (config.normalizes_weights) {
    const at::Tensor chosen_TK = probs_TE.gather(1, routing.experts_TK);
    const at::Tensor sum_T1 = chosen_TK.sum(1, /*keepdim=*/true);
    const at::Tensor mean_T1 =
        (d_chosen_TK * chosen_TK).sum(1, /*keepdim=*/true) / sum_T1;
    d_chosen_TK = (d_chosen_TK - mean_T1) / sum_T1;
  }
  const at::Tensor d_probs_TE =
      at::zeros_like(probs_TE).scatter_(1, routing.experts_TK, d_chosen_TK);
  const at::Tensor d_logits_TE =
      at::_softmax_backward_data(d_probs_TE, probs_TE, /*dim=*/1,
                                 probs_TE.scalar_type())
          .to(routing.weights_TK.scalar_type());
  return ops::MatMul(d_logits_TE, router_EH);
}

}  // namespace weft::moe
