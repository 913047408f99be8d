// A small decoder for the device of tests/support/host_device, and functions
// that move its weights, batches and pages to the device.
#ifndef WEFT_TESTS_MODEL_DEVICE_DECODER_H_
#define WEFT_TESTS_MODEL_DEVICE_DECODER_H_

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "src/model/decoder.h"
#include "src/ops/int8_weight.h"
#include "tests/model/tiny_model.h"
#include "tests/ops/quantized.h"
#include "tests/support/tolerance.h"

namespace weft::testing {

inline double Rms(const at::Tensor& x) {
  return std::sqrt(x.square().mean().item<double>());
}

// Each rounding of an element has an independent error of at most half an
// epsilon of the element. So the root mean square of the elements' errors grows
// with the square root of the number of roundings.
inline void ExpectNearInAll(const at::Tensor& actual,
                            const at::Tensor& expected, int64_t roundings,
                            const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const double error = Rms(actual.cpu().to(at::kDouble) - expected);
  EXPECT_LE(error, kEpsilonBf16 / 2 * std::sqrt(roundings) * Rms(expected))
      << what;
}

// Returns a small Llama whose widths are multiples of the vector and tile
// sizes.
inline model_config::ModelConfig WideConfig(int num_layers) {
  model_config::ModelConfig config = TinyConfig(num_layers);
  config.hidden = 128;
  config.ffn = 256;
  config.head_dim = 32;
  config.rope_tables.assign(1, {});
  for (int i = 0; i < config.head_dim / 2; ++i) {
    config.rope_tables[0].push_back(std::pow(1e4, -2.0 * i / config.head_dim));
  }
  for (model_config::LayerAttention& layer : config.attention) {
    layer.rule.scale = 1 / std::sqrt(config.head_dim);
  }
  return config;
}

// Returns the options of states and gates beside tensors of `options`: f64
// beside f64, otherwise f32.
inline at::TensorOptions OfStates(at::TensorOptions options) {
  return options.dtype(options.dtype() == at::kDouble ? at::kDouble
                                                      : at::kFloat);
}

// Converts weights to `options`. Matrices in 8 bits stay in 8 bits.
inline model::DecoderWeights WeightsTo(model::DecoderWeights weights,
                                       at::TensorOptions options) {
  const auto move = [&](at::Tensor& tensor) {
    if (!tensor.defined()) return;
    tensor = ops::IsInt8(tensor) ? Int8To(tensor, options.device())
                                 : tensor.to(options);
  };
  weights.dtype = c10::typeMetaToScalarType(options.dtype());
  for (model::LayerWeights& w : weights.layers) {
    for (at::Tensor* tensor : {&w.input_norm_H,
                               &w.q_norm_C,
                               &w.k_norm_C,
                               &w.attention_out_norm_H,
                               &w.mlp_norm_H,
                               &w.mlp_out_norm_H,
                               &w.qkv.weight_OI,
                               &w.qkv.bias_O,
                               &w.o.weight_OI,
                               &w.o.bias_O,
                               &w.gate_up.weight_OI,
                               &w.gate_up.bias_O,
                               &w.down.weight_OI,
                               &w.down.bias_O,
                               &w.conv_WR1,
                               &w.delta_norm_V,
                               &w.experts.router_EH,
                               &w.experts.gate_up_GH,
                               &w.experts.down_DF,
                               &w.experts.shared_gate_up_S2H,
                               &w.experts.shared_down_HS,
                               &w.experts.shared_gate_1H}) {
      move(*tensor);
    }
    for (at::Tensor* tensor : {&w.a_log_H, &w.dt_bias_H}) {
      if (tensor->defined()) *tensor = tensor->to(OfStates(options));
    }
  }
  move(weights.embedding_VH);
  move(weights.final_norm_H);
  weights.head_VH = weights.embedding_VH;
  return weights;
}

// Moves a batch and its adapters to the device. The adapters get the dtype.
inline model::PackedBatch BatchTo(model::PackedBatch batch,
                                  at::TensorOptions options) {
  const at::Device device = options.device();
  batch.tokens_T = batch.tokens_T.to(device);
  batch.positions_T = batch.positions_T.to(device);
  if (batch.experts_TE.defined()) {
    batch.experts_TE = batch.experts_TE.to(device);
  }
  for (lora::LoraSegment& segment : batch.routing) {
    auto version = std::make_shared<lora::AdapterVersion>(*segment.version);
    version->compute_N = version->compute_N.to(options);
    segment.version = std::move(version);
  }
  return batch;
}

// Copies slots, page tables and lengths to `device`, and sets the store.
inline model::KvAccess AccessTo(model::KvAccess kv, model::KvStore* store,
                                at::Device device) {
  kv.store = store;
  for (at::Tensor* tensor : {&kv.slots_T, &kv.key_slots_S, &kv.page_table_TL,
                             &kv.lengths_T, &kv.state_slots_Q}) {
    if (tensor->defined()) *tensor = tensor->to(device);
  }
  return kv;
}

// Fills every slot with random numbers, so that tests can read unwritten pages
// and states.
inline model::KvStore RandomStore(const model_config::ModelConfig& config,
                                  int64_t num_pages, int64_t page_tokens) {
  constexpr int64_t kStates = 8;
  model::KvStore store;
  const auto pages = [&] {
    return RandomTensor(
        {num_pages, page_tokens, config.num_kv_heads, config.head_dim}, 1,
        at::kBFloat16);
  };
  for (int layer = 0; layer < config.num_layers; ++layer) {
    store.k_pages_PSKC.push_back(pages());
    store.v_pages_PSKC.push_back(pages());
    const model_config::DeltaShape& delta = config.delta;
    const bool has_states = config.has_delta() && delta.InLayer(layer);
    store.conv_NRW.push_back(
        has_states
            ? RandomTensor({kStates, delta.conv_kernel - 1, delta.conv_width()},
                           1, at::kBFloat16)
            : at::Tensor());
    store.delta_NHKV.push_back(
        has_states ? RandomTensor({kStates, delta.value_heads,
                                   delta.key_features, delta.value_features},
                                  1 / std::sqrt(delta.key_features), at::kFloat)
                   : at::Tensor());
  }
  if (config.moe.shape.count > 0) {
    store.experts_PSE =
        at::full({num_pages, page_tokens, config.moe.shape.routing_width()}, -7,
                 at::kShort);
  }
  return store;
}

inline model::KvStore StoreTo(model::KvStore store, at::TensorOptions options) {
  const auto move = [](std::vector<at::Tensor>& tensors, at::TensorOptions to) {
    for (at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      tensor = tensor.to(to, /*non_blocking=*/false, /*copy=*/true);
    }
  };
  move(store.k_pages_PSKC, options);
  move(store.v_pages_PSKC, options);
  move(store.conv_NRW, options);
  move(store.delta_NHKV, OfStates(options));
  if (store.experts_PSE.defined()) {
    store.experts_PSE = store.experts_PSE.to(
        options.device(), at::kShort, /*non_blocking=*/false, /*copy=*/true);
  }
  return store;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_MODEL_DEVICE_DECODER_H_
