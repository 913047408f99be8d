// A tiny random model in which two of three layers compute a gated delta rule.
#ifndef WEFT_TESTS_MODEL_TINY_HYBRID_H_
#define WEFT_TESTS_MODEL_TINY_HYBRID_H_

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "src/model/decoder.h"
#include "src/model/decoder_weights.h"
#include "src/model_config/model_config.h"
#include "tests/model/tiny_model.h"

namespace weft::testing {

inline model_config::ModelConfig HybridConfig() {
  model_config::ModelConfig config = TinyConfig(/*num_layers=*/3);
  config.delta = {.layers = {true, false, true},
                  .key_heads = 2,
                  .value_heads = 4,
                  .key_features = 12,
                  .value_features = 10,
                  .conv_kernel = 4};
  return config;
}

// Returns the same layers with the sizes of heads for which a device in bf16
// has kernels over chunks.
inline model_config::DeltaShape WideDelta() {
  model_config::DeltaShape delta = HybridConfig().delta;
  delta.key_features = 128;
  delta.value_features = 64;
  return delta;
}

inline model::DecoderWeights HybridWeights(
    const model_config::ModelConfig& config, at::ScalarType dtype) {
  const model_config::DeltaShape& delta = config.delta;
  const at::ScalarType exact = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto matrix = [&](int64_t out, int64_t in) {
    return RandomTensor({out, in}, 1 / std::sqrt(static_cast<double>(in)),
                        dtype);
  };
  model::DecoderWeights w = TinyWeights(config, dtype);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    if (!delta.InLayer(layer)) continue;
    model::LayerWeights& l = w.layers[layer];
    const int64_t value = delta.value_width();
    l.qkv.weight_OI = matrix(delta.conv_width() + value + 2 * delta.value_heads,
                             config.hidden);
    l.o.weight_OI = matrix(config.hidden, value);
    l.conv_WR1 = matrix(delta.conv_width(), delta.conv_kernel);
    // Slow decays, so that tokens far back still count.
    l.a_log_H = RandomTensor({delta.value_heads}, 0.5, exact).sub_(3);
    l.dt_bias_H = RandomTensor({delta.value_heads}, 1, exact);
    l.delta_norm_V = RandomTensor({delta.value_features}, 0.2, dtype).add_(1);
  }
  return w;
}

// Runs on one thread, as TinyDecoder.
inline model::Decoder HybridDecoder(at::ScalarType dtype, uint64_t seed) {
  at::set_num_threads(1);
  at::manual_seed(seed);
  const model_config::ModelConfig config = HybridConfig();
  model::DecoderWeights weights = HybridWeights(config, dtype);
  return {config, std::move(weights), config.max_positions};
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_MODEL_TINY_HYBRID_H_
