// Tests families that differ from Llama in rotation, norms, factors, biases and
// the tensors of their checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "src/model_config/model_config.h"
#include "src/model_config/model_shard.h"
#include "src/model_config/weight_list.h"
#include "tests/model_config/parse_config.h"
#include "tests/support/status_matchers.h"

namespace weft::model_config::family_rows_test {
namespace {

using Json = nlohmann::json;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnsupported = absl::StatusCode::kUnimplemented;

// Returns a small config of the family, changed by `more`.
Json Small(const std::string& model_type, const Json& more = Json::object()) {
  Json json = Json::parse(R"({
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 320, "max_position_embeddings": 512})");
  json["model_type"] = model_type;
  json.update(more);
  return json;
}

// Returns the names of layer 1's tensors, without "model.layers.1.".
std::set<std::string> LayerTensors(const ModelConfig& config) {
  const std::string prefix = "model.layers.1.";
  std::set<std::string> names;
  for (const WeightEntry& entry : ListWeights(config)) {
    const std::string& name =
        entry.fused.is_only ? entry.fused.name : entry.name;
    if (name.starts_with(prefix)) names.insert(name.substr(prefix.size()));
  }
  return names;
}

TEST(FamilyRows, SmolLm3HasLayersWithoutRotation) {
  const ModelConfig config = Parsed(Small("smollm3"));
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_THAT(Parse(Small("smollm3", {{"max_window_layers", 28}})), IsOk());
  EXPECT_THAT(config.head_order, IsEmpty());
  ASSERT_EQ(config.rope_tables.size(), 2);
  EXPECT_EQ(config.rope_tables[0][1], std::pow(2e6, -2.0 / 16));
  EXPECT_THAT(config.rope_tables[1], Each(0));
  const auto tables = [](const ModelConfig& of) {
    std::vector<int> result;
    for (const auto& layer : of.attention) result.push_back(layer.rope_table);
    return result;
  };
  EXPECT_THAT(tables(config), ElementsAre(0, 0, 0, 1));
  EXPECT_THAT(tables(Parsed(Small("smollm3", {{"no_rope_layer_interval", 2}}))),
              ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(
      tables(Parsed(Small("smollm3", {{"no_rope_layers", {1, 0, 0, 1}}}))),
      ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(Parse(Small("smollm3", {{"no_rope_layers", {1, 0}}})),
              IsStatus(kInvalid, "no_rope_layers"));
  EXPECT_THAT(Parse(Small("smollm3", {{"no_rope_layers", {1, 0, 2, 1}}})),
              IsStatus(kInvalid, "no_rope_layers entry is 2"));
  EXPECT_THAT(Parse(Small("llama", {{"no_rope_layers", {1, 0, 1, 1}}})),
              IsStatus(kUnsupported, "no_rope_layers"));
}

TEST(FamilyRows, FeaturesThatRotateComeFirst) {
  const ModelConfig half =
      Parsed(Small("phi3", {{"partial_rotary_factor", 0.5}, {"head_dim", 8}}));
  EXPECT_THAT(half.rope_tables[0], ElementsAre(1, 0.01, 0, 0));
  // Features 0 and 2, and 1 and 3, rotate together.
  EXPECT_THAT(half.head_order, ElementsAre(0, 1, 4, 5, 2, 3, 6, 7));
  const ModelConfig pairs =
      Parsed(Small("glm4", {{"partial_rotary_factor", 0.5}, {"head_dim", 8}}));
  EXPECT_THAT(pairs.head_order, ElementsAre(0, 2, 4, 5, 1, 3, 6, 7));
  EXPECT_EQ(pairs.shape().head_order, pairs.head_order);
  EXPECT_EQ(Parsed(Small("glm4", {{"head_dim", 8}})).head_order,
            pairs.head_order);
  const Json inside = {{"rope_parameters", {{"partial_rotary_factor", 0.25}}}};
  EXPECT_THAT(Parsed(Small("glm4", inside)).rope_tables[0],
              ElementsAre(1, 0.01, 0, 0, 0, 0, 0, 0));
}

TEST(FamilyRows, RefusesRotationOfAnotherMeaning) {
  EXPECT_THAT(Parse(Small("llama", {{"partial_rotary_factor", 0.5}})),
              IsStatus(kUnsupported, "partial_rotary_factor is 0.5"));
  for (const double share : {0.0, 0.07, 0.2}) {  // 0, 1 and 3 features.
    EXPECT_THAT(Parse(Small("glm4", {{"partial_rotary_factor", share}})),
                IsStatus(kUnsupported, "partial_rotary_factor"));
  }
  EXPECT_THAT(Parse(Small("llama", {{"rope_scaling", {{"type", "mrope"}}}})),
              IsStatus(kUnsupported, "rope_type is \"mrope\""));
}

// A file of Phi-3.5, made smaller.
Json LongRope() {
  return Small("phi3", {{"original_max_position_embeddings", 128},
                        {"sliding_window", 262144},
                        {"embd_pdrop", 0.0},
                        {"resid_pdrop", 0.0},
                        {"head_dim", 4},
                        {"rope_scaling",
                         {{"type", "longrope"},
                          {"short_factor", {1.0, 2.0}},
                          {"long_factor", {3.0, 4.0}}}}});
}

TEST(FamilyRows, LongRopeEndsAtTheOriginalPositions) {
  const ModelConfig config = Parsed(LongRope());
  EXPECT_THAT(config.rope_tables[0], ElementsAre(1, 0.005));
  EXPECT_EQ(config.max_positions, 128);
  const double factor = 1 + std::log(4.0) / std::log(128.0);
  EXPECT_DOUBLE_EQ(config.attention[0].rule.scale, 0.5 * factor);
  Json json = LongRope();
  json["full_attn_mod"] = json["interpolate_factor"] = 1;
  json["head_dim"] = 8;
  json["partial_rotary_factor"] = 0.5;
  EXPECT_DOUBLE_EQ(Parsed(json).rope_magnitude, std::sqrt(factor));
  EXPECT_EQ(Parsed(json).attention[0].rule.scale, 1 / std::sqrt(8.0));
  // The field in the object has no effect, and the default is Phi3Config's.
  json = LongRope();
  json["rope_scaling"]["original_max_position_embeddings"] = 64;
  EXPECT_EQ(Parsed(json).max_positions, 128);
  json["max_position_embeddings"] = 131072;
  json.erase("original_max_position_embeddings");
  EXPECT_EQ(Parsed(json).max_positions, 4096);
  EXPECT_DOUBLE_EQ(Parsed(json).attention[0].rule.scale,
                   0.5 * (1 + std::log(32.0) / std::log(4096.0)));
  json = LongRope();
  json["rope_scaling"]["short_factor"] = {1.0};
  EXPECT_THAT(Parse(json), IsStatus(kInvalid, "short_factor is [1.0]"));
  json = LongRope();
  json["rope_scaling"]["long_factor"][1] = 0;
  EXPECT_THAT(Parse(json), IsStatus(kInvalid, "long_factor"));
  json = LongRope();
  json["model_type"] = "mistral";
  EXPECT_THAT(Parse(json), IsStatus(kUnsupported, "longrope"));
}

TEST(FamilyRows, NormsHaveTheNamesOfTheFamily) {
  EXPECT_THAT(
      LayerTensors(Parsed(Small("glm4"))),
      ElementsAre("input_layernorm.weight", "mlp.down_proj.weight",
                  "mlp.gate_up_proj.weight", "post_attention_layernorm.weight",
                  "post_mlp_layernorm.weight",
                  "post_self_attn_layernorm.weight", "self_attn.k_proj.bias",
                  "self_attn.k_proj.weight", "self_attn.o_proj.weight",
                  "self_attn.q_proj.bias", "self_attn.q_proj.weight",
                  "self_attn.v_proj.bias", "self_attn.v_proj.weight"));
  EXPECT_THAT(
      LayerTensors(Parsed(Small("olmo2"))),
      ElementsAre("mlp.down_proj.weight", "mlp.gate_proj.weight",
                  "mlp.up_proj.weight", "post_attention_layernorm.weight",
                  "post_feedforward_layernorm.weight",
                  "self_attn.k_norm.weight", "self_attn.k_proj.weight",
                  "self_attn.o_proj.weight", "self_attn.q_norm.weight",
                  "self_attn.q_proj.weight", "self_attn.v_proj.weight"));
  EXPECT_THAT(
      LayerTensors(Parsed(Small("phi3"))),
      ElementsAre("input_layernorm.weight", "mlp.down_proj.weight",
                  "mlp.gate_up_proj.weight", "post_attention_layernorm.weight",
                  "self_attn.o_proj.weight", "self_attn.qkv_proj.weight"));
}

TEST(FamilyRows, NormsOfAllHeadsNeedOneRank) {
  const ModelConfig config = Parsed(Small("olmo2"));
  EXPECT_EQ(config.qk_norm, QkNorm::kWhole);
  for (const WeightEntry& entry : ListWeights(config)) {
    if (entry.slot == WeightSlot::kQNorm) {
      EXPECT_THAT(entry.shape, ElementsAre(64));
    }
    if (entry.slot == WeightSlot::kKNorm) {
      EXPECT_THAT(entry.shape, ElementsAre(32));
    }
  }
  EXPECT_THAT(CheckTensorParallelSize(config, 1), IsOk());
  EXPECT_THAT(CheckTensorParallelSize(config, 2),
              IsStatus(kInvalid, "norms of q and k of a olmo2"));
}

TEST(FamilyRows, Olmo3ScalesTheRotationOfFullLayersAlone) {
  const Json yarn = {{"rope_type", "yarn"},
                     {"factor", 8.0},
                     {"attention_factor", 1.2},
                     {"original_max_position_embeddings", 64}};
  const ModelConfig config =
      Parsed(Small("olmo3", {{"rope_scaling", yarn}, {"rope_theta", 10000}}));
  EXPECT_EQ(config.attention[0].rule.window, 4096);
  EXPECT_EQ(config.attention[3].rule.window, 0);
  EXPECT_EQ(config.attention[0].rope_table, 1);
  EXPECT_EQ(config.rope_tables[1][4], 0.01);
  EXPECT_LT(config.rope_tables[0][7], config.rope_tables[1][7]);
  EXPECT_DOUBLE_EQ(config.attention[3].rule.scale, 0.25 * 1.44);
  EXPECT_EQ(config.attention[0].rule.scale, 0.25);
}

TEST(FamilyRows, GranitesFactorsBecomeOnes) {
  const ModelConfig config =
      Parsed(Small("granite", {{"embedding_multiplier", 12.0},
                               {"logits_scaling", 8.0},
                               {"residual_multiplier", 0.5},
                               {"rms_norm_eps", 1e-5},
                               {"attention_multiplier", 0.015625}}));
  EXPECT_EQ(config.embedding_multiplier, 24);
  EXPECT_EQ(config.logits_divisor, 8);
  EXPECT_DOUBLE_EQ(config.rms_norm_eps, 4e-5);
  EXPECT_EQ(config.attention[0].rule.scale, 0.015625);
  EXPECT_THAT(Parse(Small("granite", {{"logits_scaling", 0}})),
              IsStatus(kInvalid, "logits_scaling is 0"));
  EXPECT_THAT(Parse(Small("llama", {{"logits_scaling", 8.0}})),
              IsStatus(kUnsupported, "logits_scaling"));
}

TEST(FamilyRows, BiasesOfTheFirstProjectionsAndOfTheLastAreApart) {
  const ModelConfig seed = Parsed(Small(
      "seed_oss", {{"attention_dropout", 0.1}, {"residual_dropout", 0.1}}));
  EXPECT_TRUE(seed.qkv_bias && !seed.o_bias);
  const ModelConfig turned = Parsed(Small(
      "seed_oss", {{"attention_bias", false}, {"attention_out_bias", true}}));
  EXPECT_TRUE(!turned.qkv_bias && turned.o_bias);
  EXPECT_TRUE(Parsed(Small("glm4")).qkv_bias);
  EXPECT_THAT(Parse(Small("llama", {{"attention_out_bias", true}})),
              IsStatus(kUnsupported, "attention_out_bias"));
}

Json Ministral3() {
  return Small("ministral3", {{"rope_parameters",
                               {{"rope_type", "yarn"},
                                {"rope_theta", 1000000.0},
                                {"factor", 16.0},
                                {"mscale", 1.0},
                                {"mscale_all_dim", 1.0},
                                {"original_max_position_embeddings", 32},
                                {"max_position_embeddings", 512},
                                {"llama_4_scaling_beta", 0.1}}}});
}

TEST(FamilyRows, Ministral3ScalesQueriesByPosition) {
  const ModelConfig config = Parsed(Ministral3());
  EXPECT_EQ(config.query_scale.beta, 0.1);
  EXPECT_EQ(config.query_scale.period, 32);
  EXPECT_EQ(config.attention[0].rule.scale, 0.25);  // mscale has no effect.
  Json json = Ministral3();
  json["rope_parameters"]["max_position_embeddings"] = 1024;
  EXPECT_THAT(Parse(json), IsStatus(kInvalid, "max_position_embeddings"));
  json = Ministral3();
  json["model_type"] = "mistral";
  EXPECT_THAT(Parse(json), IsStatus(kUnsupported, "llama_4_scaling_beta"));
}

TEST(FamilyRows, WrappersTakeTheirTextModels) {
  Json text = Ministral3();
  const Json wrapper = {{"model_type", "mistral3"},
                        {"image_token_index", 10},
                        {"projector_hidden_act", "gelu"},
                        {"spatial_merge_size", 2},
                        {"vision_feature_layer", -1},
                        {"vision_config", {{"model_type", "pixtral"}}},
                        {"tie_word_embeddings", true},
                        {"text_config", text}};
  const ModelConfig config = Parsed(wrapper);
  EXPECT_EQ(config.model_type, "mistral3");
  EXPECT_TRUE(config.is_wrapped && config.tied_embeddings);
  EXPECT_EQ(config.shape().names, DecoderNames::kWrapped);
  Json other = wrapper;
  other["text_config"] = Small("llama");
  EXPECT_THAT(Parse(other),
              IsStatus(kUnsupported,
                       "text_config.model_type is \"llama\"; accepted: "
                       "\"mistral\", \"ministral3\""));
  other["text_config"] = text;
  other["text_config"]["tie_word_embeddings"] = true;
  other["tie_word_embeddings"] = false;
  EXPECT_FALSE(Parsed(other).tied_embeddings);
}

// Qwen2.5-VL-7B-Instruct, made smaller. Its decoder's fields have no object of
// their own.
Json Qwen2Vl() {
  return Small(
      "qwen2_5_vl",
      {{"image_token_id", 300},
       {"video_token_id", 301},
       {"vision_start_token_id", 302},
       {"vision_end_token_id", 303},
       {"vision_token_id", 304},
       {"max_window_layers", 28},
       {"use_sliding_window", false},
       {"sliding_window", 32768},
       {"vision_config", {{"depth", 32}}},
       {"rope_scaling", {{"type", "mrope"}, {"mrope_section", {4, 2, 2}}}}});
}

TEST(FamilyRows, RotationInThreeDirectionsIsPlainForText) {
  const ModelConfig config = Parsed(Qwen2Vl());
  EXPECT_TRUE(config.is_wrapped && config.qkv_bias);
  EXPECT_EQ(config.rope_tables[0][1], std::pow(1e6, -2.0 / 16));
  Json json = {{"model_type", "qwen3_vl"},
               {"text_config",
                Small("qwen3_vl_text", {{"rope_scaling",
                                         {{"rope_type", "default"},
                                          {"mrope_interleaved", true},
                                          {"mrope_section", {4, 2, 2}}}}})}};
  EXPECT_EQ(Parsed(json).qk_norm, QkNorm::kHead);
  json.erase("text_config");
  EXPECT_THAT(Parse(json), IsStatus(kInvalid, "text_config is null"));
}

// Qwen2.5-VL as transformers 4.52 to 4.56 saves it: the decoder's fields are
// there twice, and text_config has fields about images.
Json Qwen2VlTwice() {
  Json json = Qwen2Vl();
  Json text = json;
  text.erase("vision_config");
  text["model_type"] = "qwen2_5_vl_text";
  text["sliding_window"] = nullptr;
  text["image_token_id"] = nullptr;
  text["tie_word_embeddings"] = true;
  text["layer_types"] = Json(4, "full_attention");
  json["text_config"] = text;
  return json;
}

TEST(FamilyRows, FieldsBesideTextConfigMayRepeatIt) {
  const ModelConfig config = Parsed(Qwen2VlTwice());
  EXPECT_TRUE(config.tied_embeddings && config.is_wrapped);
  Json json = Qwen2VlTwice();
  json["tie_word_embeddings"] = false;  // Either place ties.
  EXPECT_TRUE(Parsed(json).tied_embeddings);
  json["text_config"].erase("tie_word_embeddings");
  EXPECT_FALSE(Parsed(json).tied_embeddings);
  json["hidden_size"] = 128;
  EXPECT_THAT(Parse(json), IsStatus(kUnsupported,
                                    "hidden_size is 128; accepted: the same "
                                    "as text_config says, 64"));
  json = Qwen2VlTwice();
  json["text_config"].erase("rope_scaling");
  EXPECT_THAT(Parse(json), IsStatus(kUnsupported, "rope_scaling"));
}

TEST(FamilyRows, LateLayersOfQwen2VlComeAfterTheEightieth) {
  Json json = Qwen2Vl();
  json["use_sliding_window"] = true;
  json["num_hidden_layers"] = 81;
  EXPECT_EQ(Parsed(json).attention[28].rule.window, 32768);
  json.erase("max_window_layers");
  EXPECT_EQ(Parsed(json).attention[79].rule.window, 0);
  EXPECT_EQ(Parsed(json).attention[80].rule.window, 32768);
}

// Qwen3-VL-30B-A3B-Instruct, made smaller. Its text_config does not say whether
// embeddings are tied.
Json Qwen3VlMoe() {
  Json text = Small("qwen3_vl_moe_text", {{"attention_bias", false},
                                          {"attention_dropout", 0.0},
                                          {"bos_token_id", 301},
                                          {"eos_token_id", 303},
                                          {"decoder_sparse_step", 1},
                                          {"dtype", "bfloat16"},
                                          {"hidden_act", "silu"},
                                          {"initializer_range", 0.02},
                                          {"mlp_only_layers", Json::array()},
                                          {"moe_intermediate_size", 24},
                                          {"norm_topk_prob", true},
                                          {"num_experts", 8},
                                          {"num_experts_per_tok", 2},
                                          {"rms_norm_eps", 1e-6},
                                          {"rope_scaling",
                                           {{"mrope_interleaved", true},
                                            {"mrope_section", {4, 2, 2}},
                                            {"rope_type", "default"}}},
                                          {"rope_theta", 5000000},
                                          {"use_cache", true}});
  return {{"architectures", {"Qwen3VLMoeForConditionalGeneration"}},
          {"image_token_id", 310},
          {"model_type", "qwen3_vl_moe"},
          {"text_config", std::move(text)},
          {"tie_word_embeddings", false},
          {"transformers_version", "4.57.0.dev0"},
          {"video_token_id", 311},
          {"vision_config", {{"depth", 27}}},
          {"vision_end_token_id", 312},
          {"vision_start_token_id", 313}};
}

TEST(FamilyRows, TheWrapperSaysWhetherEmbeddingsAreTied) {
  EXPECT_FALSE(Parsed(Qwen3VlMoe()).tied_embeddings);
  Json json = Qwen3VlMoe();
  json["tie_word_embeddings"] = true;
  EXPECT_TRUE(Parsed(json).tied_embeddings);
}

TEST(FamilyRows, EveryLayerOfQwen3VlMoeHasExperts) {
  Json json = Qwen3VlMoe();
  json["text_config"]["mlp_only_layers"] = {1};
  EXPECT_THAT(Parse(json), IsStatus(kUnsupported, "mlp_only_layers is [1]"));
  json = Qwen3VlMoe();
  json["text_config"]["decoder_sparse_step"] = 2;
  EXPECT_THAT(Parse(json), IsStatus(kUnsupported, "decoder_sparse_step is 2"));
}

// GLM-4.5-Air, made smaller.
Json Glm4Moe() {
  return Small("glm4_moe", {{"n_routed_experts", 8},
                            {"num_experts_per_tok", 2},
                            {"moe_intermediate_size", 24},
                            {"n_shared_experts", 2},
                            {"first_k_dense_replace", 1},
                            {"routed_scaling_factor", 1.5},
                            {"n_group", 4},
                            {"topk_group", 2},
                            {"use_qk_norm", true},
                            {"partial_rotary_factor", 0.5},
                            {"num_nextn_predict_layers", 1}});
}

TEST(FamilyRows, GlmsRouterTakesSigmoids) {
  const ModelConfig config = Parsed(Glm4Moe());
  const MoeConfig& moe = config.moe;
  EXPECT_TRUE(moe.sigmoid && moe.normalizes_weights && !moe.has_shared_gate);
  EXPECT_EQ(moe.weight_scale, 1.5);
  EXPECT_EQ(moe.groups, 4);
  EXPECT_EQ(moe.chosen_groups, 2);
  EXPECT_EQ(moe.shape.shared_ffn, 48);
  EXPECT_THAT(moe.shape.layers, ElementsAre(false, true, true, true));
  EXPECT_EQ(config.qk_norm, QkNorm::kHead);
  EXPECT_THAT(
      LayerTensors(config),
      IsSupersetOf({"mlp.gate.weight", "mlp.gate.e_score_correction_bias",
                    "mlp.experts.7.down_proj.weight",
                    "mlp.shared_experts.up_proj.weight"}));
  EXPECT_FALSE(LayerTensors(config).contains("mlp.shared_expert_gate.weight"));
}

TEST(FamilyRows, MiniMaxHasItsCorrectionBesideTheRouter) {
  const ModelConfig config =
      Parsed(Small("minimax_m2", {{"num_local_experts", 4},
                                  {"num_experts_per_tok", 2},
                                  {"scoring_func", "sigmoid"},
                                  {"rotary_dim", 8},
                                  {"attn_type_list", {1, 1, 1, 1}},
                                  {"qk_norm_type", "per_layer"},
                                  {"use_mtp", true},
                                  {"num_mtp_modules", 3},
                                  {"layernorm_mlp_beta", 1.0},
                                  {"mlp_intermediate_size", 8192},
                                  {"shared_moe_mode", "sigmoid"},
                                  {"shared_intermediate_size", 0}}));
  EXPECT_TRUE(config.moe.sigmoid && config.moe.normalizes_weights);
  EXPECT_EQ(config.qk_norm, QkNorm::kWhole);
  EXPECT_EQ(config.rope_tables[0][3], std::pow(5e6, -6.0 / 8));
  EXPECT_EQ(config.rope_tables[0][4], 0);
  EXPECT_THAT(LayerTensors(config),
              IsSupersetOf({"block_sparse_moe.gate.weight",
                            "block_sparse_moe.e_score_correction_bias",
                            "block_sparse_moe.experts.3.w2.weight"}));
}

TEST(FamilyRows, RefusesAnotherMiniMax) {
  for (const auto& [field, value] : std::vector<std::pair<const char*, Json>>{
           {"use_qk_norm", false},
           {"use_routing_bias", false},
           {"qk_norm_type", "per_head"},
           {"attn_type_list", {1, 0}},
           {"shared_intermediate_size", 8},
           {"layernorm_mlp_beta", 0.5},
           {"quantization_config", {{"quant_method", "fp8"}}}}) {
    const absl::StatusOr<ModelConfig> config =
        Parse(Small("minimax_m2", {{field, value}, {"num_local_experts", 8}}));
    EXPECT_FALSE(config.ok());
    EXPECT_THAT(config.status().message(), ::testing::HasSubstr(field));
  }
}

TEST(FamilyRows, RefusesRoutersThatItDoesNotKnow) {
  const auto refused = [](const char* field, const Json& value,
                          absl::StatusCode code) {
    Json json = Glm4Moe();
    json[field] = value;
    EXPECT_THAT(Parse(json), IsStatus(code, field));
  };
  refused("scoring_func", "softmax", kUnsupported);
  refused("topk_method", "greedy", kUnsupported);
  refused("n_group", 3, kInvalid);
  refused("n_group", 8, kInvalid);  // One expert in a group.
  refused("topk_group", 5, kInvalid);
  Json json = Glm4Moe();
  json["num_experts_per_tok"] = 5;  // Two groups have four.
  EXPECT_THAT(Parse(json), IsStatus(kInvalid, "topk_group is 2"));
  refused("first_k_dense_replace", 5, kInvalid);
  refused("routed_scaling_factor", 0, kInvalid);
}

}  // namespace
}  // namespace weft::model_config::family_rows_test
