#include "src/model_config/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <string>
#include <vector>

#include "tests/model_config/parse_config.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::model_config::model_config_test {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnsupported = absl::StatusCode::kUnimplemented;

// SmolLM2-135M in the spelling of transformers 4.
Json Llama() {
  return Json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.04,
    "intermediate_size": 1536, "is_llama_config": true,
    "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
    "rope_theta": 100000, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "use_cache": true, "vocab_size": 49152})");
}

// Qwen3-0.6B in the spelling of transformers 5.
Json Qwen3() {
  Json config = Json::parse(R"({
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": null,
    "dtype": "bfloat16", "eos_token_id": [151645, 151643], "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "pad_token_id": null,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": null, "tie_word_embeddings": true,
    "transformers_version": "5.17.0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936})");
  config["layer_types"] = std::vector<std::string>(28, "full_attention");
  return config;
}

Json Llama3Scaling() {
  return {{"rope_type", "llama3"},
          {"factor", 8.0},
          {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0},
          {"original_max_position_embeddings", 8192}};
}

TEST(ParseModelConfig, ReadsSmolLm2) {
  const auto config = Parsed(Llama());
  EXPECT_EQ(config.num_layers, 30);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.num_kv_heads, 3);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_EQ(config.qk_norm, QkNorm::kNone);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2));
  EXPECT_EQ(config.shape().q_width, 576);
  EXPECT_EQ(config.shape().kv_width, 192);
  EXPECT_EQ(config.num_parameters(), 134515008u);
  ASSERT_EQ(config.rope_tables[0].size(), 32u);
  EXPECT_EQ(config.rope_tables[0][0], 1.0);
  EXPECT_NEAR(config.rope_tables[0][16], std::pow(1e5, -0.5), 1e-12);
}

TEST(ParseModelConfig, ReadsQwen3) {
  const auto config = Parsed(Qwen3());
  EXPECT_EQ(config.qk_norm, QkNorm::kHead);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.shape().q_width, 2048);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(151645, 151643));
  EXPECT_EQ(config.num_parameters(), 596049920u);
  EXPECT_NEAR(config.rope_tables[0][1], std::pow(1e6, -2.0 / 128), 1e-12);
}

TEST(ParseModelConfig, TakesTheDefaultsOfItsFamily) {
  Json llama = Llama();
  for (const char* field :
       {"num_key_value_heads", "rms_norm_eps", "rope_theta", "eos_token_id",
        "tie_word_embeddings", "hidden_act", "attention_bias"}) {
    llama.erase(field);
  }
  const auto config = Parsed(llama);
  EXPECT_EQ(config.num_kv_heads, 9);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_FALSE(config.tied_embeddings);
  EXPECT_THAT(config.eos_token_ids, IsEmpty());
  EXPECT_NEAR(config.rope_tables[0][16], 0.01, 1e-12);
  Json qwen = Qwen3();
  qwen.erase("head_dim");
  EXPECT_EQ(Parse(qwen)->head_dim, 128);
}

TEST(ParseModelConfig, CountsBiasesAndTheHead) {
  Json json = Llama();
  json["attention_bias"] = true;
  json["mlp_bias"] = true;
  json["tie_word_embeddings"] = false;
  const auto config = Parsed(json);
  EXPECT_EQ(
      config.num_parameters(),
      134515008u + 49152u * 576 + 30u * (576 + 2 * 192 + 576 + 2 * 1536 + 576));
}

TEST(ParseModelConfig, ScalesAsLlama3PieceByPiece) {
  Json old_spelling = Llama();
  old_spelling["rope_theta"] = 500000;
  old_spelling["rope_scaling"] = Llama3Scaling();
  Json new_spelling = Llama();
  new_spelling.erase("rope_theta");
  new_spelling["rope_parameters"] = Llama3Scaling();
  new_spelling["rope_parameters"]["rope_theta"] = 500000;
  const auto config = Parsed(old_spelling);
  ASSERT_THAT(Parse(new_spelling), IsOk());
  EXPECT_EQ(config.rope_tables[0], Parse(new_spelling)->rope_tables[0]);
  for (int i = 0; i < 32; ++i) {
    const double plain = std::pow(500000.0, -2.0 * i / 64);
    const double turns = 8192 * plain / (2 * std::numbers::pi);
    const double kept = std::clamp((turns - 1) / 3, 0.0, 1.0);
    EXPECT_NEAR(config.rope_tables[0][i] / plain, (1 - kept) / 8 + kept, 1e-12)
        << i;
  }
}

TEST(ParseModelConfig, ScalesLinearly) {
  Json json = Llama();
  json["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  const auto config = Parsed(json);
  EXPECT_EQ(config.rope_tables[0][0], 0.25);
}

TEST(ParseModelConfig, DynamicScalingLeavesTheServedContextAlone) {
  Json json = Llama();
  const auto plain = Parse(json);
  json["rope_scaling"] = {{"rope_type", "dynamic"}, {"factor", 4.0}};
  const auto dynamic = Parsed(json);
  EXPECT_EQ(dynamic.rope_tables, plain->rope_tables);
  EXPECT_EQ(dynamic.max_positions, plain->max_positions);
  json["rope_scaling"].erase("factor");
  EXPECT_THAT(Parse(json), IsStatus(kInvalid, "factor"));
}

TEST(ParseModelConfig, AcceptsAWindowThatIsSwitchedOff) {
  Json json = Qwen3();
  json.erase("layer_types");
  json["sliding_window"] = 4096;
  EXPECT_THAT(Parse(json), IsOk());
  json["use_sliding_window"] = true;  // This applies only from layer 28 on,
                                      // which the model does not have.
  EXPECT_THAT(Parse(json), IsOk());
}

TEST(ParseModelConfig, AcceptsUnknownFieldsThatAreOff) {
  for (const Json& off : {Json(), Json(false), Json::array(), Json::object()}) {
    Json json = Llama();
    json["new_feature"] = off;
    EXPECT_THAT(Parse(json), IsOk()) << off;
  }
}

// Some are fields of old files, the others those of transformers 4 in
// to_json_string(use_diff=False) that are neither null nor off.
TEST(ParseModelConfig, AcceptsFieldsThatChangeNothing) {
  const auto plain = Parse(Llama());
  Json json = Llama();
  json.update(Json::parse(R"({
    "max_length": 4096, "do_sample": true, "temperature": 0.6, "top_p": 0.9,
    "top_k": 50, "typical_p": 1.0, "min_length": 0, "num_beams": 1,
    "num_beam_groups": 1, "diversity_penalty": 0.0, "repetition_penalty": 1.0,
    "length_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "num_return_sequences": 1,
    "return_dict": true, "return_dict_in_generate": false, "is_decoder": true,
    "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
    "add_cross_attention": false, "tie_encoder_decoder": false,
    "pruned_heads": {}, "chunk_size_feed_forward": 0, "use_bfloat16": false,
    "tf_legacy_loss": false, "max_sequence_length": 2048,
    "attention_dropout": 0.1, "use_flash_attn": false,
    "partial_rotary_factor": 1.0})"));
  const auto config = Parsed(json);
  EXPECT_EQ(config.rope_tables, plain->rope_tables);
  EXPECT_EQ(config.max_positions, plain->max_positions);
  EXPECT_EQ(config.eos_token_ids, plain->eos_token_ids);
}

TEST(ParseModelConfig, TakesMaxPositionsForThoseOfTheOriginalModel) {
  for (const char* kind : {"llama3", "yarn"}) {
    Json json = Llama();
    Json scaling = Llama3Scaling();
    if (std::string(kind) == "yarn") {
      scaling = {{"rope_type", "yarn"},
                 {"factor", 4.0},
                 {"original_max_position_embeddings", 8192}};
    }
    json["rope_scaling"] = scaling;
    const auto named = Parsed(json);
    json["rope_scaling"].erase("original_max_position_embeddings");
    const auto unnamed = Parsed(json);
    EXPECT_EQ(unnamed.rope_tables, named.rope_tables);
    EXPECT_EQ(unnamed.max_positions, 8192);
  }
}

// Qwen's recipe for long texts leaves max_position_embeddings as it is.
TEST(ParseModelConfig, YarnExtendsTheContextToOriginalTimesFactor) {
  Json json = Llama();
  json["rope_scaling"] = {{"rope_type", "yarn"},
                          {"factor", 4.0},
                          {"original_max_position_embeddings", 8192}};
  EXPECT_EQ(Parse(json)->max_positions, 32768);
  json["max_position_embeddings"] = 40000;
  EXPECT_EQ(Parse(json)->max_positions, 40000);
  json["rope_scaling"]["factor"] = 1e6;
  json["rope_scaling"]["original_max_position_embeddings"] = 1e9;
  EXPECT_EQ(Parse(json)->max_positions, 1 << 28);
}

struct BadField {
  std::string field;
  Json value;
  absl::StatusCode code;
  std::string message;
};

void ExpectRefused(Json config, const BadField& bad) {
  config[bad.field] = bad.value;
  EXPECT_THAT(Parse(config), IsStatus(bad.code, bad.message))
      << bad.field << " = " << bad.value;
}

TEST(ParseModelConfig, RefusesValuesOutOfRangeByName) {
  const std::vector<BadField> cases = {
      {"num_hidden_layers", 0, kInvalid, "num_hidden_layers is 0"},
      {"num_hidden_layers", 1025, kInvalid, "[1, 1024]"},
      {"hidden_size", -576, kInvalid, "hidden_size is -576"},
      {"hidden_size", int64_t{1} << 62, kInvalid, "hidden_size"},
      {"hidden_size", UINT64_MAX, kInvalid, "hidden_size"},
      {"hidden_size", 576.5, kInvalid, "hidden_size is 576.5"},
      {"hidden_size", "576", kInvalid, "hidden_size is \"576\""},
      {"hidden_size", nullptr, kInvalid, "hidden_size is null"},
      {"hidden_size", 577, kInvalid, "multiple of num_attention_heads = 9"},
      {"intermediate_size", 0, kInvalid, "intermediate_size"},
      {"vocab_size", int64_t{1} << 31, kInvalid, "vocab_size"},
      {"max_position_embeddings", 0, kInvalid, "max_position_embeddings"},
      {"num_attention_heads", 0, kInvalid, "num_attention_heads"},
      {"num_key_value_heads", 4, kInvalid, "a divisor of"},
      {"num_key_value_heads", 0, kInvalid, "num_key_value_heads"},
      {"head_dim", 63, kInvalid, "head_dim is 63"},
      {"head_dim", 4096, kInvalid, "head_dim is 4096"},
      {"rms_norm_eps", 0, kInvalid, "rms_norm_eps"},
      {"rms_norm_eps", "1e-5", kInvalid, "rms_norm_eps"},
      {"attention_bias", 1, kInvalid, "attention_bias is 1"},
      {"rope_interleaved", "yes", kInvalid, "rope_interleaved is \"yes\""},
      {"chunk_size_feed_forward", 0.5, kInvalid, "accepted: 0"},
      {"chunk_size_feed_forward", false, kInvalid, "accepted: 0"},
      {"rope_theta", -1, kInvalid, "rope_theta"},
      {"rope_scaling", 2, kInvalid, "rope_scaling is 2"},
      {"eos_token_id", 49152, kInvalid, "[0, 49152)"},
      {"eos_token_id", -1, kInvalid, "eos_token_id is -1"},
      {"eos_token_id", {1, "2"}, kInvalid, "eos_token_id is \"2\""},
      {"layer_types", {"full_attention"}, kInvalid, "a list of 30"},
      {"model_type", 1, kInvalid, "model_type is 1"}};
  for (const BadField& bad : cases) ExpectRefused(Llama(), bad);
}

TEST(ParseModelConfig, RefusesWhatItDoesNotHonourByName) {
  const std::vector<BadField> cases = {
      {"model_type", "mamba", kUnsupported, "model_type is \"mamba\""},
      {"hidden_act", "gelu", kUnsupported, "hidden_act is \"gelu\""},
      {"quantization_config",
       {{"bits", 4}},
       kUnsupported,
       "quantization_config"},
      {"sliding_window", 4096, kUnsupported, "sliding_window is 4096"},
      {"partial_rotary_factor", 0.5, kUnsupported,
       "partial_rotary_factor is 0.5"},
      {"chunk_size_feed_forward", 8, kUnsupported,
       "chunk_size_feed_forward is 8"},
      {"rope_interleaved", true, kUnsupported, "rope_interleaved"},
      {"final_logit_softcapping", 30.0, kUnsupported,
       "final_logit_softcapping"},
      {"num_experts", 8, kUnsupported, "num_experts"},
      {"nobody_knows_this", true, kUnsupported, "nobody_knows_this"},
      {"nobody_knows_this", 0, kUnsupported, "nobody_knows_this"},
      {"rope_scaling",
       {{"type", "longrope"}, {"factor", 4}},
       kUnsupported,
       "rope_type is \"longrope\""},
      {"rope_scaling",
       {{"rope_type", "dynamic"},
        {"factor", 4},
        {"original_max_position_embeddings", 2048}},
       kUnsupported,
       "original_max_position_embeddings"},
      {"rope_parameters",
       {{"partial_rotary_factor", 0.5}},
       kUnsupported,
       "partial_rotary_factor"},
      {"rope_parameters",
       {{"mrope_section", {1}}},
       kUnsupported,
       "mrope_section"},
      {"rope_parameters",
       {{"full_attention", {{"rope_theta", 1e6}}}},
       kUnsupported,
       "full_attention"}};
  for (const BadField& bad : cases) ExpectRefused(Llama(), bad);
  ExpectRefused(Qwen3(), {"mlp_bias", true, kUnsupported, "mlp_bias"});
  Json sliding = Qwen3();
  sliding["layer_types"][3] = "chunked_attention";
  EXPECT_THAT(Parse(sliding), IsStatus(kUnsupported, "chunked_attention"));
}

TEST(ParseModelConfig, RefusesDamagedLlama3Scaling) {
  for (const char* field : {"factor", "low_freq_factor", "high_freq_factor"}) {
    Json config = Llama();
    config["rope_scaling"] = Llama3Scaling();
    config["rope_scaling"].erase(field);
    EXPECT_THAT(Parse(config), IsStatus(kInvalid, field));
    config["rope_scaling"][field] = 0;
    EXPECT_THAT(Parse(config), IsStatus(kInvalid, field));
  }
  Json config = Llama();
  config["rope_scaling"] = Llama3Scaling();
  config["rope_scaling"]["high_freq_factor"] = 1.0;
  EXPECT_THAT(Parse(config), IsStatus(kInvalid, "above low_freq_factor"));
  config["rope_scaling"] = Llama3Scaling();
  config["rope_scaling"]["type"] = "linear";
  EXPECT_THAT(Parse(config), IsStatus(kInvalid, "the same as type"));
}

TEST(ParseModelConfig, RefusesDamagedJson) {
  for (const char* text :
       {"", "[]", "{", "{\"model_type\":\"llama\",\"model_type\":\"llama\"}",
        "{\"a\":[[[[[[[[[[1]]]]]]]]]]}", "{\"rms_norm_eps\":1e999}",
        "{\"x\":\"\xff\"}", "{\"rope_theta\":NaN}"}) {
    EXPECT_THAT(ParseModelConfig(text), IsStatus(kInvalid, "model config"))
        << text;
  }
}

TEST(ReadModelConfigTest, JoinsTheEndTokensOfBothFiles) {
  const TempFolder folder;
  folder.Write("config.json", Llama().dump());
  EXPECT_THAT(ReadModelConfig(folder.path())->eos_token_ids, ElementsAre(2));
  folder.Write("generation_config.json",
               R"({"eos_token_id":[0,2],"top_p":0.9})");
  EXPECT_THAT(ReadModelConfig(folder.path())->eos_token_ids, ElementsAre(2, 0));
}

TEST(ReadModelConfigTest, NamesTheFileItRefuses) {
  const TempFolder folder;
  EXPECT_THAT(ReadModelConfig(folder.path()),
              IsStatus(absl::StatusCode::kNotFound, "config.json"));
  folder.Write("config.json", "{}");
  EXPECT_THAT(ReadModelConfig(folder.path()),
              IsStatus(kInvalid, "/config.json: model_type is null"));
  folder.Write("config.json", Llama().dump());
  folder.Write("generation_config.json", R"({"eos_token_id":-5})");
  EXPECT_THAT(ReadModelConfig(folder.path()),
              IsStatus(kInvalid, "generation_config.json: eos_token_id"));
}

}  // namespace
}  // namespace weft::model_config::model_config_test
