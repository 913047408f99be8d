#include "src/lora/expert_rank.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "src/lora/peft_config.h"
#include "tests/support/status_matchers.h"

namespace weft::lora::expert_rank_test {
namespace {

using Json = nlohmann::json;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// The second of three layers is dense.
model_config::ModelShape Shape(
    model_config::ExpertNames names = model_config::ExpertNames::kMlp) {
  return {
      .num_layers = 3,
      .hidden = 8,
      .q_width = 6,
      .kv_width = 4,
      .ffn = 12,
      .vocab = 10,
      .experts = {.count = 5,
                  .per_token = 4,
                  .ffn = 7,
                  .names = names,
                  .layers = {true, names == model_config::ExpertNames::kMixtral,
                             true}}};
}

std::set<int> RanksOf(const LoraConfig& config, bool of_experts) {
  std::set<int> ranks;
  const AdapterLayout layout(Shape(), config);
  for (const LoraFactor& factor : layout.factors()) {
    if ((factor.expert != kNoExpert) == of_experts) ranks.insert(factor.rank);
  }
  return ranks;
}

TEST(WithExpertRankTest, SharesTheRankAmongTheExpertsOfAToken) {
  const auto config = WithExpertRank({.rank = 16, .alpha = 8}, Shape()).value();
  EXPECT_EQ(RanksOf(config, true), std::set<int>{4});
  EXPECT_EQ(RanksOf(config, false), std::set<int>{16});
  EXPECT_EQ(config.ShapeOf(0, TargetModule::kUpProj).scale(), 0.5);
  EXPECT_EQ(config.expert_rank, 0);
}

TEST(WithExpertRankTest, TheRankIsAtLeastOneAndMayBeTheWholeRank) {
  EXPECT_EQ(RanksOf(*WithExpertRank({.rank = 3}, Shape()), true),
            std::set<int>{1});
  EXPECT_EQ(
      RanksOf(*WithExpertRank({.rank = 3, .expert_rank = 3}, Shape()), true),
      std::set<int>{3});
}

TEST(WithExpertRankTest, ADenseModelHasNoExpertRank) {
  model_config::ModelShape dense = Shape();
  dense.experts = {};
  const LoraConfig config = {.rank = 16};
  EXPECT_EQ(*WithExpertRank(config, dense), config);
  EXPECT_THAT(WithExpertRank({.expert_rank = 2}, dense),
              IsStatus(kInvalid, "config.expert_rank is 2"));
}

TEST(WithExpertRankTest, FusedGateAndUpComeTogether) {
  const model_config::ModelShape shape =
      Shape(model_config::ExpertNames::kFused);
  EXPECT_THAT(WithExpertRank({.target_modules = {TargetModule::kQProj,
                                                 TargetModule::kUpProj}},
                             shape),
              IsStatus(kInvalid, "some of gate_proj and up_proj"));
  EXPECT_THAT(
      WithExpertRank({.target_modules = {TargetModule::kDownProj}}, shape),
      IsOk());
}

TEST(CheckRanksTest, ExpertsHaveTheirShareOfTheLimit) {
  const AdapterLayout layout(Shape(), {.rank = 16});
  EXPECT_THAT(CheckRanks(layout, Shape().experts, 64), IsOk());
  EXPECT_THAT(CheckRanks(layout, Shape().experts, 32),
              IsStatus(kInvalid,
                       "rank 16 of experts is above the limit "
                       "8 (--max-rank / experts per token)"));
}

// In the file, r is the experts' rank, so rank_pattern has no key for experts.
TEST(PeftExpertsTest, AConfigReturnsFromItsFileWithTheSameLayout) {
  for (const model_config::ExpertNames names :
       {model_config::ExpertNames::kMlp, model_config::ExpertNames::kMixtral}) {
    const model_config::ModelShape shape = Shape(names);
    const auto config = WithExpertRank({.rank = 16, .alpha = 8}, shape);
    const std::string file = WritePeftConfig(*config, shape, {}, "base");
    const Json json = Json::parse(file);
    EXPECT_EQ(json["r"], 4);
    for (const auto& [path, rank] : json["rank_pattern"].items()) {
      EXPECT_EQ(path.find("experts"), std::string::npos) << path;
    }
    const auto read = ParsePeftConfig(file, shape).value();
    const AdapterLayout before(shape, *config);
    const AdapterLayout after(shape, read);
    ASSERT_EQ(before.factors().size(), after.factors().size());
    for (size_t i = 0; i < before.factors().size(); ++i) {
      EXPECT_EQ(before.factors()[i].rank, after.factors()[i].rank);
      EXPECT_EQ(before.factors()[i].scale, after.factors()[i].scale);
    }
  }
}

TEST(PeftExpertsTest, SpellsMixtralsModules) {
  const model_config::ModelShape shape =
      Shape(model_config::ExpertNames::kMixtral);
  const AdapterLayout layout(shape,
                             {.target_modules = {TargetModule::kUpProj}});
  EXPECT_EQ(ModulePath(layout.factors()[1], shape.experts),
            "model.layers.0.block_sparse_moe.experts.1.w3");
}

TEST(PeftExpertsTest, RefusesWhatTheLayoutCannotExpress) {
  const auto parse = [](Json changes) {
    Json json = {{"peft_type", "LORA"},
                 {"r", 8},
                 {"lora_alpha", 16},
                 {"target_modules", {"up_proj"}}};
    json.update(changes);
    return ParsePeftConfig(json.dump(), Shape());
  };
  EXPECT_THAT(
      parse({{"rank_pattern", {{"experts.3.up_proj", 2}}}}),
      IsStatus(kInvalid, "model.layers.0.mlp.experts.3.up_proj has rank 2"));
  EXPECT_THAT(parse({{"target_modules", {"mlp.gate"}}}),
              IsStatus(kInvalid, "mlp.gate"));
  EXPECT_THAT(parse({{"target_modules", ".*gate"}}),
              IsStatus(kInvalid, "mlp.gate"));
}

}  // namespace
}  // namespace weft::lora::expert_rank_test
