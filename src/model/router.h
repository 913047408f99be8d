// The router of a mixture of experts. It chooses the experts of each token, and
// computes a routing weight for each chosen expert. The router is frozen, but
// gradients pass through the routing weights to the router's input.
//
// Legend: T tokens, H hidden, E experts, K experts per token.
#ifndef WEFT_SRC_MODEL_ROUTER_H_
#define WEFT_SRC_MODEL_ROUTER_H_

#include <ATen/core/Tensor.h>

#include "src/model_config/model_config.h"

namespace weft::moe {

struct Routing {
  // i64. Each token's experts have descending probability, except where the
  // caller chose the expert.
  at::Tensor experts_TK;
  at::Tensor weights_TK;  // In the dtype of x.
  // The softmax from which the weights come, in f32 or f64. It is over all
  // experts and has shape [T, E]. With softmax_of_chosen, it is over the
  // token's experts and has shape [T, K].
  at::Tensor probs;
};

// The frozen weights of a router.
struct RouterWeights {
  const at::Tensor& router_EH;
  const at::Tensor& bias_E;  // Undefined without bias.
};

// Routes the tokens. Breaks ties as torch.topk does. If `given_TK` is defined,
// each of its entries >= 0 replaces the chosen expert at the same place.
// Shapes:  x_TH [T, H], router_EH [E, H], bias_E [E], given_TK [T, K] i64 or
//          undefined.
// Errors:  throws c10::Error.   Threads: engine thread only.
// Source:  Qwen3MoeTopKRouter, MixtralTopKRouter and GptOssTopKRouter of
// transformers 5.17.
[[nodiscard]] Routing Route(const at::Tensor& x_TH,
                            const RouterWeights& weights,
                            const model::MoeConfig& config,
                            const at::Tensor& given_TK);

// Returns the routing of tokens whose experts [T, K] i64 are all given.
[[nodiscard]] Routing RouteTo(const at::Tensor& x_TH,
                              const RouterWeights& weights,
                              const model::MoeConfig& config,
                              const at::Tensor& experts_TK);

// Returns the router's part of dLoss/dx [T, H], given dLoss/dweights [T, K].
[[nodiscard]] at::Tensor RouteBackward(const at::Tensor& d_weights_TK,
                                       const Routing& routing,
                                       const at::Tensor& router_EH,
                                       const model::MoeConfig& config);

}  // namespace weft::moe

#endif  // WEFT_SRC_MODEL_ROUTER_H_
