// Small versions of the model families, a batch with rows of two adapters and
// of the base model, and one training step.
#ifndef WEFT_TESTS_MODEL_DECODER_FIXTURE_H_
#define WEFT_TESTS_MODEL_DECODER_FIXTURE_H_

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "src/model/decoder.h"
#include "tests/model/tiny_model.h"
#include "tests/support/tensors_near.h"

namespace weft::testing {

inline constexpr int64_t kRows = 26;

struct Family {
  std::string name;
  void (*change)(
      model_config::ModelConfig&);  // Turns TinyConfig into the family's
                                    // config.
};

// Gives every second layer a window. Some paths of the tiny batch are longer
// than the windows, and a window ends inside the shared prompt.
inline void SlideEvenLayers(model_config::ModelConfig& config, int64_t window) {
  for (size_t i = 0; i < config.attention.size(); i += 2) {
    config.attention[i].rule.window = window;
  }
}

inline void MakeGemma(model_config::ModelConfig& config) {
  config.norms = model_config::kGemmaNorms;
  config.scaled_embeddings = true;
  config.activation = ops::Activation::kGeluTanh;
  for (model_config::LayerAttention& layer : config.attention)
    layer.rule.scale = 0.25;
}

inline void AddExperts(model_config::ModelConfig& config,
                       model_config::ExpertShape shape, int per_token) {
  shape.layers.assign(config.num_layers, true);
  shape.per_token = per_token;
  config.moe.shape = std::move(shape);
}

inline std::vector<Family> Families() {
  return {{"llama", [](model_config::ModelConfig&) {}},
          {"llama with biases",
           [](model_config::ModelConfig& config) {
             config.qkv_bias = config.o_bias = config.mlp_bias = true;
           }},
          {"qwen3",
           [](model_config::ModelConfig& config) {
             config.qk_norm = model_config::QkNorm::kHead;
           }},
          {"qwen2 with windows",
           [](model_config::ModelConfig& config) {
             config.qkv_bias = true;
             SlideEvenLayers(config, 4);
           }},
          {"gemma2",
           [](model_config::ModelConfig& config) {
             MakeGemma(config);
             SlideEvenLayers(config, 5);
             for (model_config::LayerAttention& layer : config.attention) {
               layer.rule.softcap = 2;
             }
           }},
          {"gemma3",
           [](model_config::ModelConfig& config) {
             MakeGemma(config);
             config.qk_norm = model_config::QkNorm::kHead;
             SlideEvenLayers(config, 3);
             config.attention.front().rope_table = 1;
           }},
          {"qwen3 with experts in every second layer",
           [](model_config::ModelConfig& config) {
             config.qk_norm = model_config::QkNorm::kHead;
             AddExperts(config, {.count = 5, .ffn = 12}, 2);
             config.moe.normalizes_weights = true;
             for (int i = 0; i < config.num_layers; i += 2) {
               config.moe.shape.layers[i] = false;
             }
           }},
          {"qwen2 with a shared expert",
           [](model_config::ModelConfig& config) {
             config.qkv_bias = true;
             AddExperts(config, {.count = 7, .ffn = 9, .shared_ffn = 20}, 3);
           }},
          {"one expert per token", [](model_config::ModelConfig& config) {
             AddExperts(config, {.count = 30, .ffn = 12}, 1);
             // All layers have experts and no MLP, so ffn may be smaller than
             // the number of ranks.
             config.ffn = 1;
           }}};
}

inline model::Decoder MakeDecoder(const Family& family, at::ScalarType dtype,
                                  int num_layers = 2) {
  // With a model of this size, several threads would only wait for each other.
  at::set_num_threads(1);
  at::manual_seed(17);
  model_config::ModelConfig config = TinyConfig(num_layers);
  if (num_layers > 0) family.change(config);
  model::DecoderWeights weights = TinyWeights(config, dtype);
  return {config, std::move(weights), config.max_positions};
}

// Returns the configs of the adapters of the batch's two segments.
inline std::vector<LoraConfig> BatchAdapters(
    const model_config::ModelConfig& config) {
  LoraConfig most = {.rank = 3,
                     .alpha = 6,
                     .overrides = {{1, TargetModule::kVProj, {2, 5}},
                                   {1, TargetModule::kUpProj, {}}}};
  if (config.num_layers == 0) most.overrides.clear();
  most.target_modules.push_back(TargetModule::kEmbedTokens);
  const LoraConfig some = {
      .rank = 5,
      .alpha = 5,
      .target_modules = {TargetModule::kQProj, TargetModule::kUpProj}};
  return {most, some};
}

// Rows 0-8 belong to adapter 1 (two sequences; embedding and layers), rows 9-11
// to the base model, and rows 12-25 to adapter 2: a prompt of 6 tokens with two
// completions, then a sequence of one token.
inline model::PackedBatch MakeBatch(const model::Decoder& decoder) {
  at::manual_seed(19);
  const model_config::ModelConfig& config = decoder.config();
  const std::vector<int32_t> positions = {0, 1, 2, 3, 4, 0, 1, 2, 3,
                                          0, 1, 2, 0, 1, 2, 3, 4, 5,
                                          6, 7, 8, 6, 7, 8, 9, 0};
  model::PackedBatch batch{
      .tokens_T = at::randint(config.vocab, {kRows}, at::kLong),
      .positions_T = at::tensor(positions, at::kInt),
      .nodes = {{0, 5, -1, 5},
                {5, 9, -1, 9},
                {9, 12, -1, 12},
                {12, 18, -1, 25},
                {18, 21, 3, 21},
                {21, 25, 3, 25},
                {25, 26, -1, 26}}};
  // A token occurs twice in a segment.
  batch.tokens_T[7] = batch.tokens_T[0];
  const std::vector<LoraConfig> adapters = BatchAdapters(config);
  const lora::AdapterVersionPtr versions[] = {
      TinyVersion(config, adapters[0], decoder.dtype()),
      TinyVersion(config, adapters[1], decoder.dtype())};
  batch.routing = {{.begin = 0, .end = 9, .version = versions[0]},
                   {.begin = 12, .end = 26, .version = versions[1]}};
  return batch;
}

struct TrainResult {
  at::Tensor x_TH;  // The residual stream.
  at::Tensor y_TH;  // The output of the final norm.
  std::vector<at::Tensor> gradients;
};

// Returns a random gradient for all features of all rows.
inline at::Tensor UpstreamGradient(const model::Decoder& decoder) {
  at::manual_seed(23);
  return at::randn({kRows, decoder.config().hidden}, at::kDouble)
      .to(decoder.dtype());
}

inline TrainResult Train(const model::Decoder& decoder,
                         const model::PackedBatch& batch,
                         const at::Tensor& dy_TH, int num_recomputed) {
  const lora::LoraGradients gradients = TinyGradients(batch.routing);
  model::Tape tape;
  TrainResult result;
  result.x_TH = decoder.ForwardLayers(model::Mode::kTrain, batch, &tape,
                                      num_recomputed, /*kv=*/nullptr);
  result.y_TH = decoder.FinalNorm(result.x_TH);
  decoder.BackwardLayers(
      batch, tape, decoder.FinalNormBackward(dy_TH, result.x_TH), gradients);
  for (const lora::LoraGradient& gradient : gradients) {
    result.gradients.push_back(gradient.gradient_N);
  }
  return result;
}

inline TrainResult Train(const model::Decoder& decoder,
                         const model::PackedBatch& batch, int num_recomputed) {
  return Train(decoder, batch, UpstreamGradient(decoder), num_recomputed);
}

// Returns the number of roundings along the longest path, which has every
// reduction of every layer.
inline int64_t PathLength(const model_config::ModelConfig& config) {
  const model_config::ModelShape shape = config.shape();
  return config.num_layers * (4 * config.hidden + shape.q_width + shape.ffn +
                              2 * config.head_dim + kRows);
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_MODEL_DECODER_FIXTURE_H_
