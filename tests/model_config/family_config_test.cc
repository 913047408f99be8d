// Tests what config.json means in each family of models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/model_config/model_config.h"
#include "tests/model_config/parse_config.h"
#include "tests/support/status_matchers.h"

namespace weft::model_config::family_config_test {
namespace {

using Json = nlohmann::json;
using ::testing::Each;
using ::testing::ElementsAre;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnsupported = absl::StatusCode::kUnimplemented;

// Mistral-7B-v0.1.
Json Mistral() {
  return Json::parse(R"({
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
    "use_cache": true, "vocab_size": 32000})");
}

// Qwen2.5-0.5B.
Json Qwen2() {
  return Json::parse(R"({
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
    "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": true, "use_mrope": false, "use_sliding_window": false,
    "vocab_size": 151936})");
}

// gemma-2-2b.
Json Gemma2() {
  return Json::parse(R"({
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "attn_logit_softcapping": 50.0,
    "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "initializer_range": 0.02, "intermediate_size": 9216,
    "max_position_embeddings": 8192, "model_type": "gemma2",
    "num_attention_heads": 8, "num_hidden_layers": 26,
    "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "torch_dtype": "float32", "transformers_version": "4.42.4",
    "use_cache": true, "vocab_size": 256000})");
}

// gemma-3-1b-it in the spelling of transformers 4.
Json Gemma3Text() {
  return Json::parse(R"({
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "attn_logit_softcapping": null,
    "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": [1, 106], "final_logit_softcapping": null,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": true,
    "vocab_size": 262144})");
}

// gemma-3-4b-it, whose text_config leaves most fields to the defaults.
Json Gemma3() {
  return Json::parse(R"({
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
                    "model_type": "gemma3_text", "num_hidden_layers": 34,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model",
                      "vision_use_head": false}})");
}

// Returns the window of every layer.
std::vector<int64_t> Windows(const Json& json) {
  std::vector<int64_t> windows;
  for (const LayerAttention& layer : Parsed(json).attention) {
    windows.push_back(layer.rule.window);
  }
  return windows;
}

TEST(FamilyConfig, MistralSlidesInEveryLayerUnlessItsWindowIsNull) {
  Json json = Mistral();
  const auto config = Parsed(json);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_FALSE(config.qkv_bias);
  EXPECT_EQ(config.attention[0].rule.scale, 1 / std::sqrt(128.0));
  EXPECT_EQ(config.num_parameters(), 7241732096u);
  EXPECT_THAT(Windows(json), Each(4096));
  json["sliding_window"] = nullptr;
  EXPECT_THAT(Windows(json), Each(0));
  json.erase("sliding_window");
  EXPECT_THAT(Windows(json), Each(4096));
}

TEST(FamilyConfig, Qwen2HasBiasesOnQkvAndWindowsInItsLateLayers) {
  Json json = Qwen2();
  const auto config = Parsed(json);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_FALSE(config.o_bias);
  EXPECT_EQ(config.qk_norm, QkNorm::kNone);
  EXPECT_EQ(config.num_parameters(), 494032768u);
  EXPECT_THAT(Windows(json), Each(0));
  json["use_sliding_window"] = true;
  EXPECT_THAT(Windows(json), Each(0));
  json["num_hidden_layers"] = 4;
  json["max_window_layers"] = 2;
  EXPECT_THAT(Windows(json), ElementsAre(0, 0, 32768, 32768));
  json["layer_types"] = {"full_attention", "sliding_attention",
                         "full_attention", "full_attention"};
  EXPECT_THAT(Windows(json), ElementsAre(0, 32768, 0, 0));
  json["use_sliding_window"] = false;
  EXPECT_THAT(Parse(json), IsStatus(kInvalid, "layer_types entry is \"sli"));
}

TEST(FamilyConfig, Qwen2MoeHasWindowsInEveryOtherEarlyLayer) {
  Json json = Qwen2();
  json["model_type"] = "qwen2_moe";
  json["num_hidden_layers"] = 6;
  json["max_window_layers"] = 4;
  EXPECT_THAT(Windows(json), Each(0));
  json["use_sliding_window"] = true;
  EXPECT_THAT(Windows(json), ElementsAre(32768, 0, 32768, 0, 0, 0));
  json["layer_types"] = Json(6, "full_attention");
  json["layer_types"][5] = "sliding_attention";
  EXPECT_THAT(Windows(json), ElementsAre(0, 0, 0, 0, 0, 32768));
}

TEST(FamilyConfig, ThePaddingTokenIsTheFilesOrElseTheFamilys) {
  Json json = Gemma2();
  json["pad_token_id"] = 7;
  EXPECT_EQ(Parsed(json).padding_token, 7);
  json["pad_token_id"] = -1;
  EXPECT_EQ(Parsed(json).padding_token, Parsed(json).vocab - 1);
  json["pad_token_id"] = 1 << 20;
  EXPECT_EQ(Parsed(json).padding_token, -1);
  json["pad_token_id"] = nullptr;
  EXPECT_EQ(Parsed(json).padding_token, -1);
  json.erase("pad_token_id");
  EXPECT_EQ(Parsed(json).padding_token, 0);
  EXPECT_EQ(Parsed(Qwen2()).padding_token, -1);
}

TEST(FamilyConfig, EveryFamilyMayHaveFieldsThatSayWhatItHasAnyway) {
  Json json = Qwen2();
  json["auto_map"] = {{"AutoConfig", "configuration_qwen.QwenConfig"}};
  for (const char* field :
       {"shared_expert_intermediate_size", "shared_intermediate_size"}) {
    json[field] = 0;
    EXPECT_THAT(Parse(json), IsOk());
    json[field] = 8;
    EXPECT_THAT(Parse(json), IsStatus(kUnsupported, field));
    json.erase(field);
  }
  json["use_qk_norm"] = false;
  EXPECT_THAT(Parse(json), IsOk());
  json["use_qk_norm"] = true;
  EXPECT_THAT(Parse(json), IsStatus(kUnsupported, "use_qk_norm is true"));
  json["model_type"] = "qwen3";
  EXPECT_THAT(Parse(json), IsOk());
}

TEST(FamilyConfig, ReadsGemma2) {
  Json json = Gemma2();
  const auto config = Parsed(json);
  EXPECT_TRUE(config.has_output_norms() && config.norms_from_one &&
              config.scaled_embeddings && config.tied_embeddings);
  EXPECT_EQ(config.activation, ops::Activation::kGeluTanh);
  EXPECT_EQ(config.final_softcap, 30);
  EXPECT_EQ(config.num_parameters(), 2614341888u);
  EXPECT_EQ(config.rope_tables.size(), 1u);
  for (const LayerAttention& layer : config.attention) {
    EXPECT_EQ(layer.rule.scale, 1.0 / 16);
    EXPECT_EQ(layer.rule.softcap, 50);
    EXPECT_EQ(layer.rope_table, 0);
  }
  json["num_hidden_layers"] = 5;
  EXPECT_THAT(Windows(json), ElementsAre(4096, 0, 4096, 0, 4096));
  json["query_pre_attn_scalar"] = 144;
  EXPECT_EQ(Parse(json)->attention[0].rule.scale, 1.0 / 12);
}

TEST(FamilyConfig, NullSwitchesOffWhatGemma2HasByDefault) {
  Json json = Gemma2();
  for (const char* field :
       {"attn_logit_softcapping", "sliding_window", "final_logit_softcapping",
        "vocab_size", "num_key_value_heads", "query_pre_attn_scalar"}) {
    json.erase(field);
  }
  const auto defaults = Parsed(json);
  EXPECT_EQ(defaults.attention[0].rule.softcap, 50);
  EXPECT_EQ(defaults.attention[0].rule.window, 4096);
  EXPECT_EQ(defaults.final_softcap, 30);
  EXPECT_EQ(defaults.vocab, 256000);
  EXPECT_EQ(defaults.num_kv_heads, 4);
  for (const char* field : {"attn_logit_softcapping", "sliding_window",
                            "final_logit_softcapping"}) {
    json[field] = nullptr;
  }
  // If a layer has sliding attention and the config has no window, transformers
  // has no mask for this layer.
  EXPECT_THAT(Parse(json),
              IsStatus(absl::StatusCode::kUnimplemented, "sliding_window"));
  json["layer_types"] = std::vector<std::string>(26, "full_attention");
  const auto off = Parsed(json);
  EXPECT_EQ(off.attention[0].rule.softcap, 0);
  EXPECT_EQ(off.attention[0].rule.window, 0);
  EXPECT_EQ(off.final_softcap, 0);
}

TEST(FamilyConfig, AnAbsentNumberOfKeyHeadsIsTheFamilys) {
  Json json = Gemma2();
  json["model_type"] = "mistral";
  for (const char* field :
       {"attn_logit_softcapping", "final_logit_softcapping",
        "query_pre_attn_scalar", "hidden_activation", "hidden_act",
        "num_key_value_heads", "cache_implementation"}) {
    json.erase(field);
  }
  json["num_attention_heads"] = 16;
  const auto absent = Parsed(json);
  EXPECT_EQ(absent.num_kv_heads, 8);
  json["num_key_value_heads"] = nullptr;
  const auto null = Parsed(json);
  EXPECT_EQ(null.num_kv_heads, 16);
}

TEST(FamilyConfig, GemmasHiddenActIsNotRead) {
  Json json = Gemma2();
  json["hidden_act"] = "gelu";
  EXPECT_THAT(Parse(json), IsOk());
  json["hidden_act"] = "relu";
  EXPECT_THAT(Parse(json),
              IsStatus(absl::StatusCode::kUnimplemented, "hidden_act"));
}

TEST(FamilyConfig, TwoPatternsOfGemma3MustAgreeOrYieldToLayerTypes) {
  Json json = Gemma3Text();
  json.erase("layer_types");
  json["_sliding_window_pattern"] = 3;
  EXPECT_THAT(Parse(json), IsStatus(absl::StatusCode::kUnimplemented,
                                    "_sliding_window_pattern is 3"));
  json["layer_types"] = std::vector<std::string>(26, "full_attention");
  EXPECT_THAT(Parse(json), IsOk());
}

TEST(FamilyConfig, ReadsGemma3WithARotaryTableForItsSlidingLayers) {
  Json json = Gemma3Text();
  const auto config = Parsed(json);
  EXPECT_EQ(config.qk_norm, QkNorm::kHead);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(1, 106));
  EXPECT_EQ(config.num_parameters(), 999885952u);
  ASSERT_EQ(config.rope_tables.size(), 2u);
  EXPECT_NEAR(config.rope_tables[0][64], std::pow(1e6, -0.5), 1e-12);
  EXPECT_NEAR(config.rope_tables[1][64], 0.01, 1e-12);
  for (int i = 0; i < 26; ++i) {
    const bool full = i % 6 == 5;
    EXPECT_EQ(config.attention[i].rule.window, full ? 0 : 512);
    EXPECT_EQ(config.attention[i].rule.softcap, 0);
    EXPECT_EQ(config.attention[i].rope_table, full ? 0 : 1);
  }
  json["num_hidden_layers"] = 4;
  json["sliding_window_pattern"] = 2;
  EXPECT_THAT(Windows(json), ElementsAre(512, 0, 512, 0));
}

TEST(FamilyConfig, ReadsGemma3sNestedRotaryParameters) {
  Json json = Gemma3Text();
  for (const char* field :
       {"rope_theta", "rope_local_base_freq", "sliding_window_pattern"}) {
    json.erase(field);
  }
  json["_sliding_window_pattern"] = 6;
  json["rope_parameters"] = {
      {"full_attention",
       {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
      {"sliding_attention", {{"rope_type", "default"}}}};
  const auto config = Parsed(json);
  EXPECT_EQ(config.rope_tables[0][0], 0.125);
  EXPECT_NEAR(config.rope_tables[0][64], std::pow(1e6, -0.5) / 8, 1e-12);
  EXPECT_NEAR(config.rope_tables[1][64], 0.01, 1e-12);
  json["rope_parameters"]["chunked_attention"] = {{"rope_theta", 1e4}};
  EXPECT_THAT(Parse(json), IsStatus(kUnsupported, "chunked_attention"));
}

TEST(FamilyConfig, ReadsTheTextModelOfAWrappedGemma3) {
  Json json = Gemma3();
  const auto config = Parsed(json);
  EXPECT_EQ(config.model_type, "gemma3");
  EXPECT_EQ(config.hidden, 2560);
  EXPECT_EQ(config.num_layers, 34);
  EXPECT_EQ(config.vocab, 262208);
  EXPECT_EQ(config.num_heads, 8);
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.max_positions, 131072);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(1, 106));
  EXPECT_EQ(config.rope_tables[0][0], 0.125);
  EXPECT_EQ(config.rope_tables[1][0], 1);
  EXPECT_EQ(config.attention[0].rule.window, 1024);
  EXPECT_EQ(config.attention[5].rule.window, 0);
}

struct Refusal {
  Json config;
  std::string field;
  Json value;
  absl::StatusCode code;
  std::string message;
};

TEST(FamilyConfig, RefusesByName) {
  const Json all_full = std::vector<std::string>(32, "full_attention");
  const std::vector<Refusal> refusals = {
      {Mistral(), "sliding_window", 0, kInvalid, "sliding_window is 0"},
      {Mistral(), "layer_types", all_full, kUnsupported, "as its sliding_w"},
      {Mistral(), "attention_bias", true, kUnsupported, "attention_bias"},
      {Mistral(), "use_sliding_window", false, kUnsupported, "use_sliding"},
      {Qwen2(), "attention_bias", true, kUnsupported, "attention_bias"},
      {Qwen2(), "use_mrope", true, kUnsupported, "use_mrope"},
      {Qwen2(), "attn_logit_softcapping", 5, kUnsupported, "attn_logit"},
      {Qwen2(), "query_pre_attn_scalar", 64, kUnsupported, "query_pre_attn"},
      {Gemma2(), "hidden_activation", "relu", kUnsupported,
       "hidden_activation is \"relu\""},
      {Gemma2(), "hidden_act", "silu", kUnsupported, "hidden_act is \"silu\""},
      {Gemma2(), "attn_logit_softcapping", 0, kInvalid, "attn_logit_softcap"},
      {Gemma2(), "final_logit_softcapping", -1, kInvalid, "final_logit_soft"},
      {Gemma2(), "query_pre_attn_scalar", 0, kInvalid, "query_pre_attn_scalar"},
      {Gemma2(), "sliding_window_size", 5, kInvalid, "same as sliding_window"},
      {Gemma2(), "sliding_window_pattern", 3, kUnsupported, "_pattern"},
      {Gemma2(), "use_bidirectional_attention", true, kUnsupported,
       "use_bidirectional_attention"},
      {Gemma2(), "rope_local_base_freq", 1e4, kUnsupported, "rope_local_base"},
      {Gemma3Text(), "attn_logit_softcapping", 50, kUnsupported, "attn_logit"},
      {Gemma3Text(), "final_logit_softcapping", 30, kUnsupported,
       "final_logit_softcapping"},
      {Gemma3Text(),
       "rope_parameters",
       {{"rope_theta", 1e6}},
       kUnsupported,
       "rope_theta"},
      {Gemma3Text(), "rope_parameters", 3, kInvalid, "rope_parameters is 3"},
      {Gemma3(), "text_config", nullptr, kInvalid, "text_config is null"},
      {Gemma3(),
       "text_config",
       {{"model_type", "llama"}},
       kUnsupported,
       "text_config.model_type is \"llama\""},
      {Gemma3(),
       "text_config",
       {{"hidden_size", 0}},
       kInvalid,
       "text_config: hidden_size is 0"},
      {Gemma3(),
       "text_config",
       {{"num_experts", 4}},
       kUnsupported,
       "text_config: \"num_experts\""},
      {Gemma3(),
       "quantization_config",
       {{"bits", 4}},
       kUnsupported,
       "quantization_config"}};
  for (const Refusal& refusal : refusals) {
    Json config = refusal.config;
    config[refusal.field] = refusal.value;
    EXPECT_THAT(Parse(config), IsStatus(refusal.code, refusal.message))
        << config["model_type"] << ": " << refusal.field << " = "
        << refusal.value;
  }
}

}  // namespace
}  // namespace weft::model_config::family_config_test
