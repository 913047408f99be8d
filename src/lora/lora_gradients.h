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

// Each version occurs at most once. If a version of the routing is not in this
// list, its A and B get no gradients, but still contribute to dLoss/dx.
using LoraGradients = std::vector<LoraGradient>;

// Returns the gradient [N] of `version`, or an undefined tensor if the list
// does not have the version.
[[nodiscard]] at::Tensor GradientOf(const LoraGradients& gradients,
                                    const AdapterVersionPtr& version);

// Returns a zero gradient for each version, in the order of `versions`, which
// are distinct.
[[nodiscard]] LoraGradients ZeroGradients(
    const std::vector<AdapterVersionPtr>& versions, at::Device device);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_GRADIENTS_H_
