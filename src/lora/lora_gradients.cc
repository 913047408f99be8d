#include "src/lora/lora_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace weft::lora {

at::Tensor GradientOf(const LoraGradients& gradients,
                      const AdapterVersionPtr& version) {
  const auto found =
      std::ranges::find(gradients, version, &LoraGradient::version);
  return found == gradients.end() ? at::Tensor() : found->gradient_N;
}

LoraGradients ZeroGradients(const std::vector<AdapterVersionPtr>& versions,
                            at::Device device) {
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  LoraGradients gradients;
  for (const AdapterVersionPtr& version : versions) {
    gradients.push_back({.version = version,
                         .gradient_N = at::zeros(
                             {version->layout->num_parameters()}, options)});
  }
  return gradients;
}

}  // namespace weft::lora
