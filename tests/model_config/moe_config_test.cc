// Tests what config.json says about experts, and which tensors follow from it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/model_config/model_config.h"
#include "src/model_config/weight_list.h"
#include "tests/support/status_matchers.h"

namespace weft::model_config::moe_config_test {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnsupported = absl::StatusCode::kUnimplemented;

// Qwen3-30B-A3B.
Json Qwen3Moe() {
  return Json::parse(R"({
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": false,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936})");
}

// Mixtral-8x7B-v0.1.
Json Mixtral() {
  return Json::parse(R"({
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8,
    "output_router_logits": false, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": null, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
    "use_cache": true, "vocab_size": 32000})");
}

// gpt-oss-20b.
Json GptOss() {
  return Json::parse(R"({
    "architectures": ["GptOssForCausalLM"], "attention_bias": true,
    "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": false, "pad_token_id": 199999,
    "quantization_config": {
      "modules_to_not_convert": ["model.layers.*.self_attn"],
      "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05, "rope_theta": 150000, "rope_scaling": {
      "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
      "original_max_position_embeddings": 4096, "rope_type": "yarn",
      "truncate": false},
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0",
    "use_cache": true, "vocab_size": 201088})");
}

absl::StatusOr<ModelConfig> With(Json json, const Json& changes) {
  json.update(changes);
  return ParseModelConfig(json.dump());
}

TEST(MoeConfig, ReadsQwen3Moe) {
  const auto config = With(Qwen3Moe(), Json::object()).value();
  const ExpertShape& experts = config.moe.shape;
  EXPECT_EQ(experts.count, 128);
  EXPECT_EQ(experts.per_token, 8);
  EXPECT_EQ(experts.ffn, 768);
  EXPECT_EQ(experts.shared_ffn, 0);
  EXPECT_TRUE(config.moe.normalizes_weights);
  EXPECT_EQ(config.qk_norm, QkNorm::kHead);
  // The model's page gives this number.
  EXPECT_EQ(config.num_parameters(), 30532122624u);
}

TEST(MoeConfig, ReadsMixtral) {
  const auto config = With(Mixtral(), Json::object()).value();
  const ExpertShape& experts = config.moe.shape;
  EXPECT_EQ(experts.count, 8);
  EXPECT_EQ(experts.per_token, 2);
  EXPECT_EQ(experts.ffn, 14336);
  EXPECT_TRUE(config.moe.normalizes_weights);
  EXPECT_EQ(config.num_parameters(), 46702792704u);
}

TEST(MoeConfig, ReadsGptOss) {
  const auto config = With(GptOss(), Json::object()).value();
  EXPECT_EQ(config.moe.shape.count, 32);
  EXPECT_EQ(config.moe.shape.per_token, 4);
  EXPECT_TRUE(config.moe.softmax_of_chosen);
  EXPECT_TRUE(config.sinks && config.qkv_bias && config.o_bias);
  EXPECT_EQ(config.activation, ops::Activation::kClampedSilu);
  // The first of two layers has a window.
  EXPECT_EQ(config.attention[0].rule.window, 128);
  EXPECT_EQ(config.attention[1].rule.window, 0);
  const double factor = 0.1 * std::log(32.0) + 1;
  EXPECT_NEAR(config.attention[1].rule.scale, factor * factor / 8, 1e-12);
  // High frequencies stay, low ones are divided.
  EXPECT_EQ(config.rope_tables[0][0], 1);
  EXPECT_NEAR(config.rope_tables[0][31], std::pow(150000.0, -31.0 / 32) / 32,
              1e-15);
  // The model's page gives this number.
  EXPECT_EQ(config.num_parameters(), 20914757184u);
  EXPECT_TRUE(With(GptOss(), {{"quantization_config", nullptr}}).ok());
}

TEST(MoeConfig, ChoosesTheLayersOfExperts) {
  const auto layers = [](const Json& changes) {
    Json small = changes;
    small["num_hidden_layers"] = 4;
    return With(Qwen3Moe(), small)->moe.shape.layers;
  };
  EXPECT_THAT(layers(Json::object()), ElementsAre(true, true, true, true));
  EXPECT_THAT(layers({{"decoder_sparse_step", 2}}),
              ElementsAre(false, true, false, true));
  EXPECT_THAT(layers({{"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}}),
              ElementsAre(false, true, false, false));
}

TEST(MoeConfig, ListsTheTensorsOfExperts) {
  const auto config = With(Mixtral(), {{"num_hidden_layers", 1}});
  std::vector<std::string> names;
  for (const WeightEntry& entry : ListWeights(*config)) {
    if (entry.name.find("sparse") != std::string::npos) {
      names.push_back(entry.name);
    }
  }
  const std::string block = "model.layers.0.block_sparse_moe.";
  ASSERT_EQ(names.size(), 1u + 3 * 8);
  EXPECT_EQ(names[0], block + "gate.weight");
  EXPECT_EQ(names[1], block + "experts.0.w1.weight");
  EXPECT_EQ(names[2], block + "experts.0.w3.weight");
  EXPECT_EQ(names[17], block + "experts.0.w2.weight");
}

// Each of two ranks has half of every expert's features, and the whole router.
TEST(MoeConfig, SplitsTheFeaturesOfExperts) {
  const auto config = With(Mixtral(), {{"num_hidden_layers", 1}});
  int64_t num_gate_up = 0;
  for (const WeightEntry& entry :
       ListWeights(*config, {.rank = 1, .size = 2})) {
    if (entry.slot == WeightSlot::kRouter) {
      EXPECT_THAT(entry.part_shape, ElementsAre(8, 4096));
    } else if (entry.slot == WeightSlot::kExpertGateUp) {
      EXPECT_THAT(entry.part_shape, ElementsAre(7168, 4096));
      EXPECT_EQ(entry.part_row, 7168);
      EXPECT_THAT(entry.fused.shape, ElementsAre(8, 28672, 4096));
      // In the fused tensor, gate and up of every expert follow each other.
      EXPECT_EQ(entry.fused.first_row, 14336 * num_gate_up++);
    } else if (entry.slot == WeightSlot::kExpertDown) {
      EXPECT_THAT(entry.part_shape, ElementsAre(4096, 7168));
      EXPECT_EQ(entry.part_column, 7168);
    }
  }
}

TEST(MoeConfig, RefusesByName) {
  const struct {
    Json changes;
    absl::StatusCode code;
    const char* message;
  } kCases[] = {
      {{{"num_experts_per_tok", 129}},
       kInvalid,
       "num_experts_per_tok is 129; accepted: at most num_experts = 128"},
      {{{"num_experts", 0}}, kInvalid, "num_experts is 0"},
      {{{"num_local_experts", 64}}, kInvalid, "num_local_experts is 64"},
      {{{"mlp_only_layers", {48}}}, kInvalid, "mlp_only_layers entry is 48"},
      {{{"mlp_only_layers", 3}}, kInvalid, "mlp_only_layers is 3"},
      {{{"decoder_sparse_step", 0}}, kInvalid, "decoder_sparse_step is 0"},
      {{{"shared_expert_intermediate_size", 8}},
       kUnsupported,
       "shared_expert_intermediate_size"}};
  for (const auto& test : kCases) {
    EXPECT_THAT(With(Qwen3Moe(), test.changes),
                IsStatus(test.code, test.message));
  }
  const auto gpt_oss = [](const Json& changes, const char* message,
                          absl::StatusCode code = kUnsupported) {
    EXPECT_THAT(With(GptOss(), changes), IsStatus(code, message));
  };
  gpt_oss({{"swiglu_limit", 6.0}}, "swiglu_limit is 6.0; accepted: 7");
  gpt_oss({{"quantization_config", {{"quant_method", "awq"}}}},
          "quant_method \"mxfp4\"");
  gpt_oss({{"hidden_act", "gelu_pytorch_tanh"}}, "hidden_act");
  gpt_oss({{"rope_scaling", nullptr}}, "rope_parameters is null");
  gpt_oss({{"experts_per_token", 2}},
          "experts_per_token is 2; accepted: the same as num_experts_per_tok",
          kInvalid);
  EXPECT_THAT(
      With(Mixtral(), {{"quantization_config", {{"quant_method", "mxfp4"}}}}),
      IsStatus(kUnsupported, "quantization_config"));
  EXPECT_THAT(With(Mixtral(), {{"router_jitter_noise", 0.1}}),
              IsStatus(kUnsupported, "router_jitter_noise"));
}

}  // namespace
}  // namespace weft::model_config::moe_config_test
