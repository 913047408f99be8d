// Tests families whose layers compute a gated delta rule: their fields, the
// tensors of their checkpoints, and the parts of a rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/model_config/model_config.h"
#include "src/model_config/model_shard.h"
#include "src/model_config/weight_list.h"
#include "tests/model_config/parse_config.h"
#include "tests/support/status_matchers.h"

namespace weft::model_config::delta_config_test {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::SizeIs;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnsupported = absl::StatusCode::kUnimplemented;

// Qwen3.5-0.8B.
Json Qwen35() {
  return Json::parse(R"({
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": {
      "attention_bias": false, "attention_dropout": 0.0,
      "attn_output_gate": true, "dtype": "bfloat16", "eos_token_id": 248044,
      "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
      "hidden_size": 1024, "initializer_range": 0.02,
      "intermediate_size": 3584, "linear_conv_kernel_dim": 4,
      "linear_key_head_dim": 128, "linear_num_key_heads": 16,
      "linear_num_value_heads": 16, "linear_value_head_dim": 128,
      "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
      "mlp_only_layers": [], "model_type": "qwen3_5_text",
      "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
      "num_attention_heads": 8, "num_hidden_layers": 24,
      "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
      "tie_word_embeddings": true, "use_cache": true, "vocab_size": 248320,
      "rope_parameters": {
        "mrope_interleaved": true, "mrope_section": [11, 11, 10],
        "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25}},
    "tie_word_embeddings": true, "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057, "vision_config": {"depth": 12},
    "vision_end_token_id": 248054, "vision_start_token_id": 248053})");
}

// Qwen3-Next-80B-A3B-Instruct, in the spelling of transformers 4.
Json Qwen3Next() {
  return Json::parse(R"({
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
    "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_next", "moe_intermediate_size": 512,
    "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "output_router_logits": false,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936})");
}

// A small config of the family, changed by `more`.
Json Small(const std::string& model_type, const Json& more = Json::object()) {
  Json json = Json::parse(R"({
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 320, "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 8, "linear_value_head_dim": 5})");
  if (model_type != "qwen3_5_text") {
    json.update(Json::parse(R"({"num_experts": 4, "num_experts_per_tok": 2,
      "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16})"));
  }
  json["model_type"] = model_type;
  json.update(more);
  return json;
}

TEST(DeltaConfigTest, ReadsAPublishedModel) {
  const ModelConfig config = Parsed(Qwen35());
  EXPECT_EQ(config.model_type, "qwen3_5");
  EXPECT_EQ(config.delta.key_heads, 16);
  EXPECT_EQ(config.delta.conv_width(), 6144);
  EXPECT_TRUE(config.output_gate && config.norms_from_one &&
              config.tied_embeddings);
  EXPECT_THAT(config.attention, SizeIs(24));
  for (int layer = 0; layer < 24; ++layer) {
    EXPECT_EQ(config.delta.InLayer(layer), layer % 4 != 3) << layer;
  }
  // transformers loads the text model alone for text, with plain names.
  EXPECT_EQ(config.shape().names, DecoderNames::kPlain);
  EXPECT_EQ(config.shape().gate_width, 2048);
  EXPECT_EQ(config.head_order.size(), 256u);
}

TEST(DeltaConfigTest, ParametersAreAsManyAsPublished) {
  // The names say 0.8B and 80B. The part for images is not counted.
  EXPECT_NEAR(static_cast<double>(Parsed(Qwen35()).num_parameters()), 0.8e9,
              0.05e9);
  const ModelConfig next = Parsed(Qwen3Next());
  EXPECT_NEAR(static_cast<double>(next.num_parameters()), 80e9, 0.5e9);
  EXPECT_EQ(next.rope_tables[0].size(), 128u);
  EXPECT_GT(next.rope_tables[0][31], 0);
  EXPECT_EQ(next.rope_tables[0][32], 0);
}

TEST(DeltaConfigTest, LayerTypesComeBeforeTheInterval) {
  EXPECT_THAT(Parsed(Small("qwen3_5_text")).delta.layers,
              ElementsAre(true, false, true));
  Json json = Small("qwen3_5_text", {{"full_attention_interval", 3}});
  EXPECT_THAT(Parsed(json).delta.layers, ElementsAre(true, false, true));
  json.erase("layer_types");
  EXPECT_THAT(Parsed(json).delta.layers, ElementsAre(true, true, false));
}

TEST(DeltaConfigTest, RefusesWhatTheLayersDoNotCompute) {
  const struct {
    const char* field;
    Json value;
    absl::StatusCode code;
    const char* says;
  } kCases[] = {{"attn_output_gate", false, kUnsupported, "accepted: true"},
                {"hidden_act", "gelu_pytorch_tanh", kUnsupported, "\"silu\""},
                {"mamba_ssm_dtype", "bfloat16", kUnsupported, "\"float32\""},
                {"mamba_ssm_dtype", 32, kInvalid, "\"float32\""},
                {"linear_num_value_heads", 5, kInvalid,
                 "a multiple of linear_num_key_heads = 2"},
                {"linear_num_key_heads", 0, kInvalid, "[1, 1024]"},
                {"linear_conv_kernel_dim", 1, kInvalid, "[2, 8]"},
                {"linear_conv_kernel_dim", 9, kInvalid, "[2, 8]"},
                {"linear_value_head_dim", 1025, kInvalid, "[1, 1024]"},
                {"layer_types", Json::array({"linear_attention"}), kInvalid,
                 "a list of 3"},
                {"layer_types",
                 Json::array({"mamba", "full_attention", "full_attention"}),
                 kUnsupported, "\"linear_attention\", \"full_attention\""},
                {"layer_types",
                 Json::array({"linear_attention", "linear_attention",
                              "linear_attention"}),
                 kUnsupported, "at least one layer of full attention"},
                {"full_attention_interval", 0, kInvalid, "[1, 1024]"}};
  for (const auto& c : kCases) {
    const auto config = Parse(Small("qwen3_5_text", {{c.field, c.value}}));
    EXPECT_THAT(config, IsStatus(c.code, c.field)) << c.value;
    EXPECT_THAT(config, IsStatus(c.code, c.says)) << c.value;
  }
}

// The field of Qwen3.6 and 3.8.
TEST(DeltaConfigTest, TheGateOfOutputsIsSilu) {
  for (const char* name : {"swish", "silu"}) {
    EXPECT_THAT(Parse(Small("qwen3_5_text", {{"output_gate_type", name}})),
                IsOk());
  }
  EXPECT_THAT(Parse(Small("qwen3_5_text", {{"output_gate_type", "sigmoid"}})),
              IsStatus(kUnsupported,
                       "output_gate_type is \"sigmoid\"; accepted: \"silu\", "
                       "\"swish\""));
}

TEST(DeltaConfigTest, OtherFamiliesHaveNoLinearLayers) {
  Json json = Small("qwen3_5_text");
  json["model_type"] = "qwen3";
  EXPECT_THAT(Parse(json), IsStatus(kUnsupported, "\"linear_attention\""));
}

TEST(DeltaConfigTest, RouterWeightsOfTheseFamiliesSumToOne) {
  for (const char* type : {"qwen3_5_moe_text", "qwen3_next"}) {
    const ModelConfig config = Parsed(Small(type));
    EXPECT_TRUE(config.moe.normalizes_weights);
    EXPECT_FALSE(config.qkv_bias);
    EXPECT_EQ(config.moe.shape.shared_ffn, 16);
  }
  const Json off = {{"norm_topk_prob", false}};
  EXPECT_THAT(Parse(Small("qwen3_5_moe_text", off)),
              IsStatus(kUnsupported, "norm_topk_prob"));
  EXPECT_FALSE(Parsed(Small("qwen3_next", off)).moe.normalizes_weights);
}

// The shape of each tensor of a layer, by its name after "model.layers.N.".
std::map<std::string, std::vector<int64_t>> TensorsOf(const ModelConfig& config,
                                                      int layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  std::map<std::string, std::vector<int64_t>> tensors;
  for (const WeightEntry& entry : ListWeights(config)) {
    const bool is_part = entry.fused.is_only;
    const std::string& name = is_part ? entry.fused.name : entry.name;
    if (!name.starts_with(prefix)) continue;
    tensors[name.substr(prefix.size())] =
        is_part ? entry.fused.shape : entry.shape;
  }
  return tensors;
}

TEST(DeltaWeightsTest, HaveTheNamesAndShapesOfTransformers) {
  using Shape = std::vector<int64_t>;
  auto tensors = TensorsOf(Parsed(Small("qwen3_5_text")), 0);
  EXPECT_EQ(tensors["linear_attn.in_proj_qkv.weight"], Shape({62, 64}));
  EXPECT_EQ(tensors["linear_attn.in_proj_z.weight"], Shape({30, 64}));
  EXPECT_EQ(tensors["linear_attn.in_proj_b.weight"], Shape({6, 64}));
  EXPECT_EQ(tensors["linear_attn.in_proj_a.weight"], Shape({6, 64}));
  EXPECT_EQ(tensors["linear_attn.conv1d.weight"], Shape({62, 1, 4}));
  EXPECT_EQ(tensors["linear_attn.A_log"], Shape({6}));
  EXPECT_EQ(tensors["linear_attn.dt_bias"], Shape({6}));
  EXPECT_EQ(tensors["linear_attn.norm.weight"], Shape({5}));
  EXPECT_EQ(tensors["linear_attn.out_proj.weight"], Shape({64, 30}));
  EXPECT_THAT(tensors, SizeIs(14));  // And two norms, gate, up and down.
  auto attention = TensorsOf(Parsed(Small("qwen3_5_text")), 1);
  EXPECT_EQ(attention["self_attn.q_proj.weight"], Shape({128, 64}));
  auto fused = TensorsOf(Parsed(Small("qwen3_next")), 0);
  EXPECT_EQ(fused["linear_attn.in_proj_qkvz.weight"], Shape({92, 64}));
  EXPECT_EQ(fused["linear_attn.in_proj_ba.weight"], Shape({12, 64}));
}

// The rows of the fused tensors that a matrix of input projections has, in its
// order: those of the whole model, or of a rank.
std::vector<int64_t> InputRows(const ModelConfig& config, int layer,
                               const parallel::Shard& shard = {}) {
  std::vector<int64_t> rows;
  for (const WeightEntry& entry : ListWeights(config, shard)) {
    if (entry.slot != WeightSlot::kQkv || entry.layer != layer) continue;
    EXPECT_EQ(entry.first_row, static_cast<int64_t>(rows.size()));
    for (int64_t i = 0; i < entry.part_shape[0]; ++i) {
      rows.push_back(entry.fused.first_row + entry.part_row + i);
    }
  }
  return rows;
}

TEST(DeltaWeightsTest, FusedRowsGoFromKeyHeadsToProjections) {
  const std::vector<int64_t> rows = InputRows(Parsed(Small("qwen3_next")), 0);
  ASSERT_THAT(rows, SizeIs(92 + 12));
  // A key head has 8 rows of q, 8 of k, 15 of v and 15 of z; then, in the other
  // tensor, 3 of b and 3 of a.
  EXPECT_EQ(rows[0], 0);              // q of head 0
  EXPECT_EQ(rows[8], 46);             // q of head 1
  EXPECT_EQ(rows[16], 8);             // k of head 0
  EXPECT_EQ(rows[32 + 15], 46 + 16);  // v of head 1
  EXPECT_EQ(rows[62], 31);            // z of head 0
  EXPECT_EQ(rows[92 + 3], 6);         // b of head 1
  EXPECT_EQ(rows[92 + 6], 3);         // a of head 0
}

TEST(DeltaWeightsTest, RanksHaveTheRowsOfTheirKeyHeads) {
  for (const char* type : {"qwen3_5_text", "qwen3_next"}) {
    const ModelConfig config = Parsed(Small(type));
    const std::vector<int64_t> whole = InputRows(config, 0);
    for (int rank = 0; rank < 2; ++rank) {
      const parallel::Shard shard = {.rank = rank, .size = 2};
      const std::vector<int64_t> own = InputRows(config, 0, shard);
      ASSERT_EQ(own.size() * 2, whole.size());
      size_t begin = 0, next = 0;
      // Each rank has half of q, k, v, z, b and a.
      for (const size_t rows : {16, 16, 30, 30, 6, 6}) {
        for (size_t i = 0; i < rows / 2; ++i) {
          EXPECT_EQ(own[next++], whole[begin + rank * rows / 2 + i]) << type;
        }
        begin += rows;
      }
    }
  }
}

TEST(DeltaWeightsTest, DecayAndStepAreWideAndTheGatedNormIsNotFromOne) {
  const ModelConfig config = Parsed(Small("qwen3_5_text"));
  EXPECT_TRUE(IsWide(WeightSlot::kDecay, config));
  EXPECT_TRUE(IsWide(WeightSlot::kDtBias, config));
  EXPECT_TRUE(IsFromOne(WeightSlot::kInputNorm, config));
  EXPECT_TRUE(IsNorm(WeightSlot::kDeltaNorm));
  EXPECT_FALSE(IsFromOne(WeightSlot::kDeltaNorm, config));
}

TEST(DeltaShardTest, RanksHaveValueHeadsOfTheirKeyHeads) {
  const ModelConfig config = Parsed(Small("qwen3_5_text"));
  EXPECT_THAT(CheckTensorParallelSize(config, 2), IsOk());
  EXPECT_THAT(CheckTensorParallelSize(config, 4),
              IsStatus(kInvalid, "4 > 2 key heads of linear layers"));
  const parallel::Shard shard = {.rank = 1, .size = 2};
  const ModelConfig local = LocalConfig(config, shard);
  EXPECT_EQ(local.delta.key_heads, 1);
  EXPECT_EQ(local.delta.value_heads, 3);
  const ShapeRanges ranges = LocalRanges(config, shard);
  EXPECT_EQ(ranges.delta_value, (parallel::Range{15, 30}));
  EXPECT_EQ(local.shape().delta.conv_width(), 8 + 8 + 15);
  EXPECT_EQ(local.shape().gate_width, 32);
}

}  // namespace
}  // namespace weft::model_config::delta_config_test
