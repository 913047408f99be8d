// A random model with a few thousand parameters, and adapters for it.
#ifndef WEFT_TESTS_MODEL_TINY_MODEL_H_
#define WEFT_TESTS_MODEL_TINY_MODEL_H_

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "src/lora/lora_linear.h"
#include "src/model/decoder.h"
#include "src/model/decoder_weights.h"
#include "src/model_config/model_config.h"

namespace weft {

// All widths differ, so that none can be mistaken for another.
inline model_config::ModelConfig TinyConfig(int num_layers = 2) {
  model_config::ModelConfig config = {.num_layers = num_layers,
                                      .hidden = 24,
                                      .ffn = 40,
                                      .vocab = 53,
                                      .num_heads = 4,
                                      .num_kv_heads = 2,
                                      .head_dim = 8,
                                      .max_positions = 128,
                                      .rms_norm_eps = 1e-5,
                                      .tied_embeddings = true};
  // The second table is for tests in which some layers use another theta.
  for (const double theta : {10000.0, 50.0}) {
    std::vector<double>& table = config.rope_tables.emplace_back();
    for (int i = 0; i < config.head_dim / 2; ++i) {
      table.push_back(std::pow(theta, -2.0 * i / config.head_dim));
    }
  }
  config.attention.assign(num_layers,
                          {.rule = {.scale = 1 / std::sqrt(config.head_dim)}});
  return config;
}

// Draws from torch's global generator, so call at::manual_seed before.
inline at::Tensor RandomTensor(const std::vector<int64_t>& sizes, double scale,
                               at::ScalarType dtype) {
  return (at::randn(sizes, at::kDouble) * scale).to(dtype);
}

inline model::ExpertWeights TinyExperts(const model_config::ModelConfig& config,
                                        at::ScalarType dtype) {
  const model_config::ExpertShape& experts = config.moe.shape;
  const int64_t hidden = config.hidden;
  const auto matrix = [&](int64_t out, int64_t in) {
    return RandomTensor({out, in}, 1 / std::sqrt(static_cast<double>(in)),
                        dtype);
  };
  model::ExpertWeights w;
  // Spreads the logits, so that rounding does not change a token's experts.
  w.router_EH = matrix(experts.count, hidden) * 4;
  w.gate_up_GH = matrix(experts.count * 2 * experts.ffn, hidden);
  w.down_DF = matrix(experts.count * hidden, experts.ffn);
  if (experts.shared_ffn > 0) {
    w.shared_gate_up_S2H = matrix(2 * experts.shared_ffn, hidden);
    w.shared_down_HS = matrix(hidden, experts.shared_ffn);
    w.shared_gate_1H = matrix(1, hidden);
  }
  return w;
}

inline model::DecoderWeights TinyWeights(
    const model_config::ModelConfig& config, at::ScalarType dtype) {
  const model_config::ModelShape shape = config.shape();
  const auto norm = [&](int64_t size) {
    return RandomTensor({size}, 0.2, dtype).add_(1);
  };
  const auto linear = [&](int64_t out, int64_t in, bool with_bias) {
    const double scale = 1 / std::sqrt(static_cast<double>(in));
    lora::BaseLinear base{.weight_OI = RandomTensor({out, in}, scale, dtype)};
    if (with_bias) base.bias_O = RandomTensor({out}, 0.3, dtype);
    return base;
  };
  model::DecoderWeights w;
  w.embedding_VH = RandomTensor({config.vocab, config.hidden}, 1, dtype);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    model::LayerWeights l;
    l.input_norm_H = norm(config.hidden);
    l.qkv = linear(shape.q_width + 2 * shape.kv_width, config.hidden,
                   config.qkv_bias);
    if (config.qk_norm == model_config::QkNorm::kHead) {
      l.q_norm_C = norm(config.head_dim);
      l.k_norm_C = norm(config.head_dim);
    }
    l.o = linear(config.hidden, shape.q_width, config.o_bias);
    l.mlp_norm_H = norm(config.hidden);
    if (config.has_output_norms()) {
      l.attention_out_norm_H = norm(config.hidden);
      l.mlp_out_norm_H = norm(config.hidden);
    }
    if (config.moe.shape.InLayer(layer)) {
      l.experts = TinyExperts(config, dtype);
    } else {
      l.gate_up = linear(2 * config.ffn, config.hidden, config.mlp_bias);
      l.down = linear(config.hidden, config.ffn, config.mlp_bias);
    }
    w.layers.push_back(std::move(l));
  }
  w.final_norm_H = norm(config.hidden);
  w.head_VH = w.embedding_VH;
  return w;
}

// Runs on one thread, because with a model of this size several threads would
// only wait for each other.
inline model::Decoder TinyDecoder(at::ScalarType dtype, uint64_t seed) {
  at::set_num_threads(1);
  at::manual_seed(seed);
  const model_config::ModelConfig config = TinyConfig();
  model::DecoderWeights weights = TinyWeights(config, dtype);
  return {config, std::move(weights), config.max_positions};
}

// Makes a version with random weights. B is random too, because with the zero B
// of a new adapter the adapter would change nothing.
inline lora::AdapterVersionPtr TinyVersion(
    const model_config::ModelConfig& config, const LoraConfig& lora_config,
    at::ScalarType dtype, uint64_t number = 1) {
  auto version = std::make_shared<lora::AdapterVersion>();
  version->number = number;
  version->layout =
      std::make_shared<lora::AdapterLayout>(config.shape(), lora_config);
  version->compute_N =
      RandomTensor({version->layout->num_parameters()}, 0.2, dtype);
  version->weights_N = version->compute_N.to(at::kFloat);
  return version;
}

// Makes a zero gradient for each version of the routing, on the device of the
// version's weights. The gradient is f64 for f64 weights, otherwise f32. The
// routing must have each version only once.
inline lora::LoraGradients TinyGradients(const lora::LoraRouting& routing) {
  lora::LoraGradients gradients;
  for (const lora::LoraSegment& segment : routing) {
    const at::Tensor& weights_N = segment.version->compute_N;
    const bool exact = weights_N.scalar_type() == at::kDouble;
    gradients.push_back({.version = segment.version,
                         .gradient_N = at::zeros_like(
                             weights_N, exact ? at::kDouble : at::kFloat)});
  }
  return gradients;
}

}  // namespace weft

#endif  // WEFT_TESTS_MODEL_TINY_MODEL_H_
