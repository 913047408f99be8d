// Tests what exports for programs other than PEFT have. tests/oracle
// (test_loaders.py) compares what the programs make of them.
#include "src/lora/loader_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "src/lora/peft_format.h"
#include "tests/support/status_matchers.h"

namespace weft::lora::loader_rules_test {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kFailed = absl::StatusCode::kFailedPrecondition;

// The first of two layers is dense, the other one has two experts and a shared
// one.
model_config::ModelShape Shape(
    model_config::ExpertNames names = model_config::ExpertNames::kMlp) {
  return {.num_layers = 2,
          .hidden = 3,
          .q_width = 4,
          .kv_width = 2,
          .ffn = 5,
          .vocab = 7,
          .experts = {.count = 2,
                      .per_token = 1,
                      .ffn = 3,
                      .shared_ffn = 2,
                      .names = names,
                      .layers = {false, true}}};
}

// The experts have a rank of their own.
LoraConfig Config() {
  LoraConfig config{
      .rank = 4,
      .alpha = 6,
      .target_modules = {TargetModule::kQProj, TargetModule::kGateProj,
                         TargetModule::kUpProj, TargetModule::kDownProj}};
  for (const TargetModule module :
       {TargetModule::kGateProj, TargetModule::kUpProj,
        TargetModule::kDownProj}) {
    config.overrides.push_back(
        {.layer = 1, .module = module, .shape = {.rank = 2, .alpha = 3}});
  }
  return config;
}

std::vector<float> Counting(const LoraConfig& config) {
  std::vector<float> values(AdapterLayout(Shape(), config).num_parameters());
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

Json ConfigOf(Loader loader) {
  return Json::parse(
      WritePeft(Config(), Shape(), Counting(Config()), "b", loader)[0].second);
}

TEST(LoaderRules, PeftHasMlpsAndExpertsAsParameters) {
  const Json json = ConfigOf(Loader::kPeft);
  EXPECT_EQ(json["target_modules"], Json({"q_proj"}));
  const std::string parameters = json["target_parameters"].dump();
  for (const char* name : {"model.layers.0.mlp.gate_proj.weight",
                           "model.layers.1.mlp.experts.gate_up_proj",
                           "model.layers.1.mlp.experts.down_proj",
                           "model.layers.1.mlp.shared_expert.up_proj.weight"}) {
    EXPECT_THAT(parameters, HasSubstr(name));
  }
  EXPECT_EQ(json["r"], 4);
}

// The server's own folders come back as they were, whatever gate and up have.
// Programs that have them as one would read others.
TEST(LoaderRules, GateAndUpThatDifferAreForLoadersThatHaveThemApart) {
  LoraConfig alone = Config(), ranks = Config(), scales = Config();
  std::erase(alone.target_modules, TargetModule::kGateProj);
  std::erase_if(alone.overrides, [](const LoraOverride& other) {
    return other.module == TargetModule::kGateProj;
  });
  ranks.overrides[1].shape = {.rank = 4, .alpha = 6};
  scales.overrides[1].shape.alpha = 9;
  model_config::ModelShape wrapper = Shape();
  wrapper.wrapper_names = model_config::DecoderNames::kWrapped;
  for (const LoraConfig& config : {alone, ranks, scales}) {
    const AdapterLayout layout(Shape(), config);
    const PeftFiles files = WritePeft(config, Shape(), Counting(config), "b");
    const auto read = ReadPeft(files, Shape());
    ASSERT_THAT(read, IsOk());
    EXPECT_EQ(AdapterLayout(Shape(), read->config).factors(), layout.factors());
    EXPECT_EQ(read->weights, Counting(config));
    EXPECT_THAT(CheckLoader(Loader::kPeft, layout, Shape()),
                IsStatus(kFailed, "model.layers.1.mlp.experts.0 has"));
    EXPECT_THAT(CheckLoader(Loader::kVllm, layout, Shape()), IsOk());
    EXPECT_THAT(CheckLoader(Loader::kLlamaCpp, layout, Shape()), IsOk());
    const bool one_scale_is_enough = config == scales;
    EXPECT_EQ(CheckLoader(Loader::kVllm, layout, wrapper).ok(),
              one_scale_is_enough);
  }
}

TEST(LoaderRules, VllmHasSingleExpertsUnlessItsClassIsAWrapper) {
  const LoraConfig config = Config();
  const auto tensors = [&](model_config::ModelShape shape) {
    return WritePeft(config, shape, Counting(config), "b", Loader::kVllm)[1]
        .second;
  };
  model_config::ModelShape shape = Shape();
  EXPECT_THAT(tensors(shape), HasSubstr(".layers.1.mlp.experts.1.up_proj"));
  shape.wrapper_names = model_config::DecoderNames::kWrapped;
  EXPECT_THAT(tensors(shape),
              HasSubstr("model.language_model.layers.1.mlp.experts.lora_A"));
  EXPECT_THAT(tensors(shape), Not(HasSubstr("experts.1.up_proj")));
}

TEST(LoaderRules, LlamaCppHasOneRank) {
  const LoraConfig config = Config();
  const PeftFiles files =
      WritePeft(config, Shape(), Counting(config), "b", Loader::kLlamaCpp);
  const Json json = Json::parse(files[0].second);
  EXPECT_EQ(json["r"], 4);
  EXPECT_EQ(json["lora_alpha"], 6);
  EXPECT_TRUE(json["rank_pattern"].empty() && json["alpha_pattern"].empty());
  const auto read = ReadPeft(files, Shape());
  ASSERT_THAT(read, IsOk());
  EXPECT_TRUE(read->config.overrides.empty());
}

TEST(LoaderRules, OneScaleIsInTheWeights) {
  LoraConfig config = Config();
  config.overrides[0].shape.alpha = 12;  // Four times the scale of others.
  const AdapterLayout layout(Shape(), config);
  const std::vector<float> weights = Counting(config);
  const std::vector<float> scaled = ScaledWeights(layout, weights);
  EXPECT_EQ(WithOneScale(config), Config());
  for (const LoraFactor& factor : layout.factors()) {
    const bool other =
        factor.layer == 1 && factor.module == TargetModule::kGateProj;
    EXPECT_EQ(scaled[factor.a_offset], weights[factor.a_offset]);
    EXPECT_EQ(scaled[factor.b_offset],
              weights[factor.b_offset] * (other ? 4 : 1));
  }
}

TEST(LoaderRules, LlamaCppHasNoNamesForFusedExperts) {
  const model_config::ModelShape shape =
      Shape(model_config::ExpertNames::kFused);
  const AdapterLayout all(shape, Config());
  EXPECT_THAT(CheckLoader(Loader::kLlamaCpp, all, shape),
              IsStatus(kFailed, "adapter has LoRA in model.layers.1.mlp."));
  EXPECT_THAT(CheckLoader(Loader::kVllm, all, shape), IsOk());
  const AdapterLayout attention(shape,
                                {.target_modules = {TargetModule::kQProj}});
  EXPECT_THAT(CheckLoader(Loader::kLlamaCpp, attention, shape), IsOk());
}

}  // namespace
}  // namespace weft::lora::loader_rules_test
