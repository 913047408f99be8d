// A checkpoint with random numbers in every tensor of a config.
#ifndef WEFT_TESTS_MODEL_CHECKPOINT_OF_CONFIG_H_
#define WEFT_TESTS_MODEL_CHECKPOINT_OF_CONFIG_H_

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/model_config/weight_list.h"
#include "src/weights/safetensors.h"
#include "tests/weights/files.h"

namespace weft::testing {

class CheckpointOfConfig {
 public:
  // Draws from torch's global generator, so call at::manual_seed before.
  explicit CheckpointOfConfig(const model_config::ModelConfig& config) {
    for (const model_config::WeightEntry& entry :
         model_config::ListWeights(config)) {
      const double scale =
          entry.shape.size() > 1
              ? 1 / std::sqrt(static_cast<double>(entry.shape[1]))
              : 0.2;
      tensors[entry.name] = (at::randn(entry.shape) * scale).to(at::kBFloat16);
    }
  }

  // Writes the tensors and opens them.
  std::unique_ptr<weights::Checkpoint> Open() const {
    std::vector<weights::NamedTensor> views;
    for (const auto& [name, tensor] : tensors) {
      const auto* bytes =
          static_cast<const std::byte*>(tensor.const_data_ptr());
      views.push_back({.name = name,
                       .view = {.dtype = weights::ScalarType::kBf16,
                                .shape = tensor.sizes().vec(),
                                .bytes = {bytes, tensor.nbytes()}}});
    }
    (void)folder_.Write("model.safetensors", weights::WriteSafetensors(views));
    return weights::Checkpoint::Open(folder_.path()).value();
  }

  std::map<std::string, at::Tensor> tensors;  // By name, in bf16.

 private:
  weights::TempFolder folder_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_MODEL_CHECKPOINT_OF_CONFIG_H_
