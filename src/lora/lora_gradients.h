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

// Each version occurs at most once. If a version of the routing does not occur,
// it does not learn, but dLoss/dx still passes through its matrices.
using LoraGradients = std::vector<LoraGradient>;

// Returns the version's gradient [N], or an undefined tensor if there is none.
[[nodiscard]] at::Tensor GradientOf(const LoraGradients& gradients,
                                    const AdapterVersionPtr& version);

// Returns new zero gradients of these versions, in the same order.
[[nodiscard]] LoraGradients ZeroGradients(
    const std::vector<AdapterVersionPtr>& versions, at::Device device);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_GRADIENTS_H_
