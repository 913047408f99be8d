// Where a backward pass adds the gradients of adapters.
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

// Each version at most once. A version of a routing that is not among them
// learns nothing: dLoss/dx passes through its matrices all the same.
using LoraGradients = std::vector<LoraGradient>;

// The version's gradient [N], undefined when it is not among them.
[[nodiscard]] at::Tensor GradientOf(const LoraGradients& gradients,
                                    const AdapterVersionPtr& version);

// New gradients of these versions, all zeros, in their order.
[[nodiscard]] LoraGradients ZeroGradients(
    const std::vector<AdapterVersionPtr>& versions, at::Device device);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_GRADIENTS_H_
