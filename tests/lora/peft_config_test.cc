#include "src/lora/peft_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/status_matchers.h"

namespace weft::lora::peft_config_test {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr model_config::ModelShape kShape = {.num_layers = 2,
                                             .hidden = 4,
                                             .q_width = 6,
                                             .kv_width = 2,
                                             .ffn = 8,
                                             .vocab = 10};

// Returns a file with every field that PEFT 0.21 writes.
Json Written() {
  return Json::parse(R"({
    "task_type": "CAUSAL_LM", "peft_type": "LORA", "auto_mapping": null,
    "peft_version": "0.21.2", "base_model_name_or_path": "some/model",
    "revision": null, "inference_mode": true, "r": 8,
    "target_modules": ["v_proj", "q_proj"], "exclude_modules": null,
    "lora_alpha": 16, "lora_dropout": 0.05, "fan_in_fan_out": false,
    "bias": "none", "use_rslora": false, "modules_to_save": null,
    "init_lora_weights": true, "layers_to_transform": null,
    "layers_pattern": null, "rank_pattern": {}, "alpha_pattern": {},
    "megatron_config": null, "megatron_core": "megatron.core",
    "trainable_token_indices": null, "loftq_config": {}, "eva_config": null,
    "corda_config": null, "lora_ga_config": null, "use_dora": false,
    "velora_config": null, "alora_invocation_tokens": null,
    "use_qalora": false, "qalora_group_size": 16, "monteclora_config": null,
    "layer_replication": null, "lora_bias": false, "target_parameters": null,
    "use_bdlora": null, "arrow_config": null, "kasa_config": null,
    "ensure_weight_tying": false})");
}

absl::StatusOr<LoraConfig> Parse(const Json& config) {
  return ParsePeftConfig(config.dump(), kShape);
}

TEST(ParsePeftConfig, ReadsWhatPeftWrites) {
  const auto config = Parse(Written()).value();
  EXPECT_EQ(config.rank, 8);
  EXPECT_EQ(config.alpha, 16);
  EXPECT_THAT(config.target_modules,
              ElementsAre(TargetModule::kQProj, TargetModule::kVProj));
}

TEST(ParsePeftConfig, FoldsRankStabilisationIntoAlpha) {
  Json json = Written();
  json["use_rslora"] = true;
  const auto config = Parse(json).value();
  EXPECT_DOUBLE_EQ(config.ShapeOf(0, TargetModule::kQProj).scale(),
                   16 / std::sqrt(8.0));
}

TEST(ParsePeftConfig, SkipsHowEvaInitialised) {
  Json json = Written();
  json["init_lora_weights"] = "eva";
  json["eva_config"] = {{"rho", 2.0}};
  EXPECT_THAT(Parse(json), IsOk());
}

TEST(ParsePeftConfig, ReadsAllLinearAsEveryProjectionButTheHead) {
  Json json = Written();
  json["target_modules"] = "all-linear";
  EXPECT_EQ(Parse(json)->target_modules, DefaultTargetModules());
}

TEST(ParsePeftConfig, AcceptsFullPathsThatCoverEveryLayer) {
  Json json = Written();
  json["target_modules"] = {"model.layers.0.mlp.up_proj",
                            "layers.1.mlp.up_proj", "self_attn.o_proj",
                            "lm_head"};
  EXPECT_THAT(Parse(json)->target_modules,
              ElementsAre(TargetModule::kOProj, TargetModule::kUpProj,
                          TargetModule::kLmHead));
  EXPECT_THAT(Parse(json)->overrides, IsEmpty());
}

TEST(ParsePeftConfig, RefusesByName) {
  const std::vector<std::pair<const char*, Json>> cases = {
      {"peft_type", "IA3"},
      {"peft_type", nullptr},
      {"task_type", "SEQ_CLS"},
      {"r", nullptr},
      {"r", "8"},
      {"r", 0},
      {"r", -1},
      {"r", 8.5},
      {"r", 1000000},
      {"lora_alpha", nullptr},
      {"lora_alpha", 0},
      {"lora_alpha", -1},
      {"lora_alpha", 1e30},
      {"lora_alpha", "16"},
      {"lora_dropout", 1.0},
      {"lora_dropout", "0"},
      {"use_rslora", 1},
      {"use_dora", true},
      {"bias", "lora_only"},
      {"lora_bias", true},
      {"rank_pattern", {{"(a+)+$", 0}}},
      {"rank_pattern", {{"q_proj", 0}}},
      {"rank_pattern", {{"q_proj", 4.5}}},
      {"rank_pattern", {{"(?=q_proj)", 4}}},
      {"rank_pattern", {"q_proj"}},
      {"rank_pattern", {{"q_proj(", 4}}},
      {"alpha_pattern", {{"q_proj", 0}}},
      {"alpha_pattern", {{"q_proj", "4"}}},
      {"alpha_pattern", {{"*", 4}}},
      {"modules_to_save", {"lm_head"}},
      {"layers_to_transform", {2}},
      {"layers_to_transform", -1},
      {"layers_to_transform", true},
      {"layers_to_transform", {"0"}},
      {"layers_to_transform", "0"},
      {"layers_pattern", "layers"},
      {"layer_replication", {{0, 1}}},
      {"fan_in_fan_out", true},
      {"exclude_modules", "(?!q_proj)"},
      {"exclude_modules", {1}},
      {"exclude_modules", std::vector<std::string>(100, "q_proj")},
      {"init_lora_weights", "pissa"},
      {"init_lora_weights", "corda"},
      {"init_lora_weights", "loftq"},
      {"loftq_config", {{"loftq_bits", 4}}},
      {"corda_config", {{"corda_method", "ipm"}}},
      {"megatron_config", {{"layers", 2}}},
      {"ensure_weight_tying", true},
      {"velora_config", {{"scale", 1}}},
      {"trainable_token_indices", {1}},
      {"alora_invocation_tokens", {1}},
      {"use_qalora", true},
      {"target_parameters", {"x"}},
      {"a_field_of_next_year", 1},
      {"target_modules", nullptr},
      {"target_modules", Json::array()},
      {"target_modules", "(a+)+$"},
      {"target_modules", "q_proj"},
      {"target_modules", {"norm"}},
      {"target_modules", {"xq_proj"}},
      {"target_modules", {"model.layers.2.self_attn.q_proj"}},
      {"target_modules", {""}},
      {"target_modules", {1}},
      {"target_modules", std::vector<std::string>(100, "q_proj")}};
  for (const auto& [field, value] : cases) {
    Json json = Written();
    json[field] = value;
    EXPECT_THAT(Parse(json), IsStatus(kInvalid, field)) << field << value;
  }
}

TEST(ParsePeftConfig, RefusesMissingFieldsAndDamagedFiles) {
  for (const char* field : {"peft_type", "r", "lora_alpha", "target_modules"}) {
    Json json = Written();
    json.erase(field);
    EXPECT_THAT(Parse(json), IsStatus(kInvalid, field)) << field;
  }
  for (const char* text : {"", "[]", "{", R"({"r":1,"r":1})",
                           R"({"a":[[[[[[[[1]]]]]]]]})", "{\"r\":\"\xff\"}"}) {
    EXPECT_THAT(ParsePeftConfig(text, kShape),
                IsStatus(kInvalid, "adapter_config.json"))
        << text;
  }
}

TEST(WritePeftConfig, ComesBackAsItWas) {
  for (const double alpha : {32.0, 0.1, 11.313708498984761}) {
    const LoraConfig config = {
        .rank = 3,
        .alpha = alpha,
        .target_modules = {TargetModule::kKProj, TargetModule::kLmHead}};
    const std::string text =
        WritePeftConfig(config, kShape, {}, "bad \xff name");
    const auto read = ParsePeftConfig(text, kShape).value();
    EXPECT_EQ(read, config);
  }
}

TEST(WritePeftConfig, WritesAWholeAlphaAsAnInteger) {
  const Json json =
      Json::parse(WritePeftConfig({.alpha = 32}, kShape, {}, "m"));
  EXPECT_TRUE(json["lora_alpha"].is_number_integer());
  EXPECT_EQ(json["base_model_name_or_path"], "m");
}

}  // namespace
}  // namespace weft::lora::peft_config_test
