// The router of a mixture of experts: which experts see a token, and with what
// weight. It is frozen, but gradients pass through its weights to its input.
//
// Legend: T tokens, H hidden, E experts, K experts per token.
#ifndef WEFT_SRC_MOE_ROUTER_H_
#define WEFT_SRC_MOE_ROUTER_H_

#include <ATen/core/Tensor.h>

#include "src/model_config/model_config.h"

namespace weft::moe {

struct Routing {
  at::Tensor experts_TK;  // i64; a token's experts, the most probable first.
  at::Tensor weights_TK;  // In the dtype of x.
  at::Tensor probs_TE;    // Softmax of the logits, in f32 or f64.
};

// Routes the tokens. If `experts_TK` is defined, they go to these experts, and
// only the weights are computed. Ties are broken as torch.topk does.
// Shapes:  x_TH [T, H], router_EH [E, H], experts_TK [T, K] or undefined.
// Errors:  throws c10::Error.   Threads: engine thread only.
// Source:  Qwen3MoeTopKRouter and MixtralTopKRouter of transformers 5.17.
[[nodiscard]] Routing Route(const at::Tensor& x_TH, const at::Tensor& router_EH,
                            const model::MoeConfig& config,
                            const at::Tensor& experts_TK);

// Returns dLoss/dx [T, H] of the router, given dLoss/dweights [T, K].
[[nodiscard]] at::Tensor RouteBackward(const at::Tensor& d_weights_TK,
                                       const Routing& routing,
                                       const at::Tensor& router_EH,
                                       const model::MoeConfig& config);

}  // namespace weft::moe

#endif  // WEFT_SRC_MOE_ROUTER_H_
