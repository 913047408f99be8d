// The buffers to which a backward pass adds the gradients of adapters.
//
// Legend: N parameters of an adapter.
#ifndef WEFT_SRC_LORA_LORA_GRADIENTS_H_
#define WEFT_SRC_LORA_LORA_GRADIENTS_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/lora/adapter.h"

namespace weft::lora {

struct LoraGradient {
  AdapterVersionPtr version;
  at::Tensor gradient_N;  // [N] f32, in the version's layout.
};

// Each version occurs at most once. A version of the routing that is not in
// this list gets no gradient, but dLoss/dx still includes the products by its A
// and B.
using LoraGradients = std::vector<LoraGradient>;

// Returns the gradient [N] of `version`, or an undefined tensor if the list
// does not have the version.
[[nodiscard]] at::Tensor GradientOf(const LoraGradients& gradients,
                                    const AdapterVersionPtr& version);

// Returns a zero gradient for each version, in the same order.
[[nodiscard]] LoraGradients ZeroGradients(
    const std::vector<AdapterVersionPtr>& versions, at::Device device);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_GRADIENTS_H_
