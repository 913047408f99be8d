#include "src/lora/peft_targets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/lora/peft_config.h"
#include "tests/support/status_matchers.h"

namespace weft::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr ModelShape kShape = {.num_layers = 12,
                               .hidden = 4,
                               .q_width = 6,
                               .kv_width = 2,
                               .ffn = 8,
                               .vocab = 10};

absl::StatusOr<LoraConfig> Parse(const PeftJson& changes) {
  PeftJson json = {{"peft_type", "LORA"},
                   {"r", 8},
                   {"lora_alpha", 16},
                   {"target_modules", {"q_proj", "up_proj"}}};
  json.update(changes);
  return ParsePeftConfig(json.dump(), kShape);
}

// Paths of what the file adapts; every one of 12 layers unless told.
std::vector<std::string> Paths(const PeftJson& changes) {
  const auto config = Parse(changes);
  EXPECT_THAT(config, IsOk());
  std::vector<std::string> paths;
  if (!config.ok()) return paths;
  const AdapterLayout layout(kShape, *config);
  for (const LoraFactor& factor : layout.factors()) {
    paths.push_back(ModulePath(factor));
  }
  return paths;
}

std::string Q(int layer) {
  return absl::StrCat("model.layers.", layer, ".self_attn.q_proj");
}

TEST(PatternMatches, AsTheExpressionOfPeftDoes) {
  const std::string path = Q(1);
  for (const char* key :
       {"q_proj", "self_attn.q_proj", "1.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj", "^model.layers.1.self_attn.q_proj",
        // A dot stands for any character.
        "q.proj", "self.attn.q_proj", "......"}) {
    EXPECT_TRUE(PatternMatches(key, path)) << key;
  }
  for (const char* key :
       {"proj", "_proj", "attn.q_proj", "k_proj", "^q_proj", "q_proj.",
        "self_attn", "layers.1.q_proj", "x.model.layers.1.self_attn.q_proj",
        "^model.layers.1.self_attn", "."}) {
    EXPECT_FALSE(PatternMatches(key, path)) << key;
  }
  EXPECT_FALSE(PatternMatches("1.self_attn.q_proj", Q(11)));
}

TEST(IsPlain, HasNothingElseOfAnExpression) {
  for (const char* key : {"q_proj", "^lm_head", "model.layers.0", "a-b"}) {
    EXPECT_TRUE(IsPlain(key)) << key;
  }
  for (const char* key : {"", "^", "q_proj$", ".*", "a|b", "(a)", "[ab]", "a+",
                          "a?", "a{2}", "a\\.b", "^^a", "a^", "a b", "\xc3"}) {
    EXPECT_FALSE(IsPlain(key)) << key;
  }
}

TEST(ReadTargets, KeepsTheLayersToTransform) {
  EXPECT_THAT(
      Paths({{"target_modules", {"q_proj"}}, {"layers_to_transform", {1, 11}}}),
      ElementsAre(Q(1), Q(11)));
  EXPECT_THAT(Paths({{"target_modules", {"q_proj"}},
                     {"layers_to_transform", 3},
                     {"layers_pattern", "layers"}}),
              ElementsAre(Q(3)));
  EXPECT_THAT(Paths({{"target_modules", {"q_proj"}},
                     {"layers_to_transform", {3}},
                     {"layers_pattern", PeftJson::array({"layers"})}}),
              ElementsAre(Q(3)));
  // A whole path is not asked for its layer.
  EXPECT_THAT(Paths({{"target_modules", {"q_proj", "lm_head"}},
                     {"layers_to_transform", {0}}}),
              ElementsAre(Q(0), "lm_head"));
  EXPECT_EQ(Paths({{"layers_to_transform", PeftJson::array()}}).size(), 24u);
}

TEST(ReadTargets, RefusesWhatPeftReadsInTwoWays) {
  EXPECT_THAT(Parse({{"target_modules", {Q(0)}}, {"layers_to_transform", {0}}}),
              IsStatus(kInvalid, Q(0)));
  EXPECT_THAT(
      Parse({{"target_modules", "all-linear"}, {"layers_to_transform", {0}}}),
      IsStatus(kInvalid, "layers_to_transform"));
  EXPECT_THAT(Parse({{"layers_to_transform", {0}}, {"layers_pattern", "h"}}),
              IsStatus(kInvalid, "layers_pattern is \"h\""));
}

TEST(ReadTargets, TakesPathsOfSomeLayers) {
  const auto config = Parse({{"target_modules", {Q(2), "11.mlp.up_proj"}}});
  ASSERT_THAT(config, IsOk());
  EXPECT_THAT(config->target_modules,
              ElementsAre(TargetModule::kQProj, TargetModule::kUpProj));
  EXPECT_EQ(config->overrides.size(), 22u);
  EXPECT_THAT(Paths({{"target_modules", {Q(2), "11.mlp.up_proj"}}}),
              ElementsAre(Q(2), "model.layers.11.mlp.up_proj"));
}

TEST(ReadTargets, TakesAStringForTheWholePath) {
  EXPECT_THAT(Paths({{"target_modules", Q(4)}}), ElementsAre(Q(4)));
  EXPECT_THAT(Paths({{"target_modules", "^lm.head"}}), ElementsAre("lm_head"));
  EXPECT_EQ(Paths({{"target_modules", "All-Linear"}}).size(), 84u);
  EXPECT_THAT(Parse({{"target_modules", "q_proj"}}),
              IsStatus(kInvalid, "target_modules is \"q_proj\""));
}

TEST(ReadTargets, LeavesExcludedModulesOut) {
  std::vector<std::string> all = Paths({{"target_modules", {"q_proj"}}});
  EXPECT_EQ(Paths({{"exclude_modules", {"mlp.up_proj", "vision_tower"}}}), all);
  std::erase(all, Q(5));
  EXPECT_EQ(Paths({{"target_modules", {"q_proj"}}, {"exclude_modules", Q(5)}}),
            all);
  EXPECT_THAT(Parse({{"exclude_modules", {"q_proj", "up_proj"}}}),
              IsStatus(kInvalid, "target_modules"));
}

TEST(ReadTargets, TakesTheFirstPatternThatFits) {
  const auto config = Parse({{"rank_pattern", {{Q(1), 2}, {"q_proj", 4}}},
                             {"alpha_pattern", {{"q_proj", 5}, {Q(1), 3}}}});
  ASSERT_THAT(config, IsOk());
  const auto shape = [&](int layer, TargetModule module) {
    return config->ShapeOf(layer, module);
  };
  EXPECT_EQ(shape(1, TargetModule::kQProj), (LoraShape{2, 5}));
  EXPECT_EQ(shape(11, TargetModule::kQProj), (LoraShape{4, 5}));
  EXPECT_EQ(shape(1, TargetModule::kUpProj), (LoraShape{8, 16}));
  EXPECT_EQ(shape(1, TargetModule::kVProj), LoraShape{});
  EXPECT_EQ(config->overrides.size(), 12u);
}

TEST(ReadTargets, StabilisesEveryRankByItsOwnRoot) {
  const auto config =
      Parse({{"use_rslora", true}, {"rank_pattern", {{"q_proj", 2}}}});
  ASSERT_THAT(config, IsOk());
  EXPECT_DOUBLE_EQ(config->ShapeOf(3, TargetModule::kQProj).scale(),
                   16 / std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(config->ShapeOf(3, TargetModule::kUpProj).scale(),
                   16 / std::sqrt(8.0));
}

TEST(ReadTargets, PatternsOfOtherModulesSayNothing) {
  const auto config =
      Parse({{"rank_pattern", {{"v_proj", 2}, {"nothing", 3}}}});
  ASSERT_THAT(config, IsOk());
  EXPECT_THAT(config->overrides, IsEmpty());
}

TEST(WriteTargets, ComesBackAsItWas) {
  const std::vector<PeftJson> cases = {
      {{"target_modules", {Q(2), "11.mlp.up_proj", "lm_head"}}},
      {{"target_modules", "all-linear"},
       {"exclude_modules", {"0.mlp.up_proj"}}},
      {{"rank_pattern", {{Q(1), 2}, {"q_proj", 4}}},
       {"alpha_pattern", {{"up_proj", 0.5}}}},
      {{"use_rslora", true},
       {"rank_pattern", {{Q(1), 3}, {"lm_head", 5}}},
       {"target_modules", {"q_proj", "lm_head"}},
       {"layers_to_transform", {1, 2}}}};
  for (const PeftJson& changes : cases) {
    const auto config = Parse(changes);
    ASSERT_THAT(config, IsOk()) << changes;
    const std::string text = WritePeftConfig(*config, kShape, "base");
    const auto again = ParsePeftConfig(text, kShape);
    ASSERT_THAT(again, IsOk()) << text;
    EXPECT_EQ(*again, *config) << text;
  }
}

TEST(WriteTargets, NamesAModuleOnceWhereEveryLayerHasIt) {
  const auto config = Parse({{"target_modules", {"up_proj", Q(3), Q(4)}}});
  ASSERT_THAT(config, IsOk());
  nlohmann::json root;
  WriteTargets(*config, kShape, root);
  EXPECT_THAT(root["target_modules"].get<std::vector<std::string>>(),
              UnorderedElementsAreArray({std::string("up_proj"), Q(3), Q(4)}));
}

}  // namespace
}  // namespace weft::lora
