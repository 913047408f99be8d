#include "src/lora/peft_targets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/lora/peft_config.h"
#include "tests/support/status_matchers.h"

namespace weft::lora::peft_targets_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr model_config::ModelShape kShape = {.num_layers = 12,
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

// Returns the paths that the changed file adapts. The model has 12 layers.
// Without changes, the file adapts modules of all layers.
std::vector<std::string> Paths(const PeftJson& changes) {
  std::vector<std::string> paths;
  const AdapterLayout layout(kShape, Parse(changes).value());
  for (const LoraFactor& factor : layout.factors()) {
    paths.push_back(ModulePath(factor));
  }
  return paths;
}

std::string Q(int layer) {
  return absl::StrCat("model.layers.", layer, ".self_attn.q_proj");
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
  // layers_to_transform does not restrict a name that is a whole path.
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
  const auto config =
      Parse({{"target_modules", {Q(2), "11.mlp.up_proj"}}}).value();
  EXPECT_THAT(config.target_modules,
              ElementsAre(TargetModule::kQProj, TargetModule::kUpProj));
  EXPECT_EQ(config.overrides.size(), 22u);
  EXPECT_THAT(Paths({{"target_modules", {Q(2), "11.mlp.up_proj"}}}),
              ElementsAre(Q(2), "model.layers.11.mlp.up_proj"));
}

TEST(ReadTargets, TakesAStringForTheWholePath) {
  EXPECT_THAT(Paths({{"target_modules", Q(4)}}), ElementsAre(Q(4)));
  // As in PEFT, names that match nothing are ignored if another name matches.
  EXPECT_THAT(Paths({{"target_modules", {"c_attn", Q(4), "W_pack"}}}),
              ElementsAre(Q(4)));
  EXPECT_THAT(Parse({{"target_modules", {"c_attn", "W_pack"}}}),
              IsStatus(kInvalid, "target_modules is [\"c_attn\",\"W_pack\"]"));
  EXPECT_THAT(Paths({{"target_modules", "^lm.head"}}), ElementsAre("lm_head"));
  EXPECT_EQ(Paths({{"target_modules", "All-Linear"}}).size(), 84u);
  EXPECT_THAT(Parse({{"target_modules", "q_proj"}}),
              IsStatus(kInvalid, "target_modules is \"q_proj\""));
}

TEST(ReadTargets, TakesAnExpressionForTheWholePath) {
  EXPECT_THAT(Paths({{"target_modules", R"(.*\.(3|11)\.self_attn\.q_.*)"}}),
              ElementsAre(Q(3), Q(11)));
  EXPECT_THAT(Paths({{"target_modules", "lm_head|.*embed_tokens"}}),
              ElementsAre("lm_head", "model.embed_tokens"));
  EXPECT_THAT(Paths({{"target_modules", ".*q_proj"},
                     {"exclude_modules", R"(.*\.([0-46-9]|1\d)\..*)"}}),
              ElementsAre(Q(5)));
  EXPECT_THAT(Parse({{"target_modules", "(q|v)_proj"}}),
              IsStatus(kInvalid, "target_modules is \"(q|v)_proj\""));
}

TEST(ReadTargets, RefusesExpressionsThatMatchOtherModulesToo) {
  for (const auto& [expression, module] :
       {std::pair(".*", "model"), std::pair("model\\.layers.*", "model.layers"),
        std::pair(".*(mlp|q_proj)", "model.layers.0.mlp"),
        std::pair(".*norm|lm_head", "model.norm")}) {
    EXPECT_THAT(Parse({{"target_modules", expression}}),
                IsStatus(kInvalid, absl::StrCat("; ", module, ", which")))
        << expression;
  }
  EXPECT_THAT(Paths({{"target_modules", ".*(norm|lm_head)"},
                     {"exclude_modules", ".*norm"}}),
              ElementsAre("lm_head"));
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
                             {"alpha_pattern", {{"q_proj", 5}, {Q(1), 3}}}})
                          .value();
  const auto shape = [&](int layer, TargetModule module) {
    return config.ShapeOf(layer, module);
  };
  EXPECT_EQ(shape(1, TargetModule::kQProj), (LoraShape{2, 5}));
  EXPECT_EQ(shape(11, TargetModule::kQProj), (LoraShape{4, 5}));
  EXPECT_EQ(shape(1, TargetModule::kUpProj), (LoraShape{8, 16}));
  EXPECT_EQ(shape(1, TargetModule::kVProj), LoraShape{});
  EXPECT_EQ(config.overrides.size(), 12u);
}

TEST(ReadTargets, TakesExpressionsForTheEndOfAPath) {
  const auto config =
      Parse({{"rank_pattern", {{"(1|2)\\.self.*", 2}, {"[a-q]_proj", 4}}},
             {"alpha_pattern", {{"^up_proj", 5}, {".*up_proj", 3}}}})
          .value();
  const auto shape = [&](int layer, TargetModule module) {
    return config.ShapeOf(layer, module);
  };
  EXPECT_EQ(shape(1, TargetModule::kQProj), (LoraShape{2, 16}));
  EXPECT_EQ(shape(11, TargetModule::kQProj), (LoraShape{4, 16}));
  EXPECT_EQ(shape(1, TargetModule::kUpProj), (LoraShape{8, 3}));
}

TEST(ReadTargets, ExpressionsOfAFileShareABudget) {
  PeftJson ranks = PeftJson::object();
  PeftJson alphas = PeftJson::object();
  for (int layer = 0; layer < 12; ++layer) {
    ranks[Q(layer)] = layer + 1;
    alphas[absl::StrCat("(", std::string(600, 'a' + layer), ")|q_proj")] = 3;
  }
  EXPECT_THAT(Parse({{"rank_pattern", ranks}, {"alpha_pattern", alphas}}),
              IsOk());
  alphas["(" + std::string(1200, 'z') + ")"] = 3;
  EXPECT_THAT(Parse({{"rank_pattern", ranks}, {"alpha_pattern", alphas}}),
              IsStatus(kInvalid, "at most 8192 instructions"));
  // A key that is a plain path does not count against the limit of RE2
  // instructions. But the number of keys has a limit, too.
  for (int i = 0; i < 105; ++i) ranks[absl::StrCat("other", i)] = 1;
  EXPECT_THAT(Parse({{"rank_pattern", ranks}}), IsOk());
  ranks["one_more"] = 1;
  EXPECT_THAT(Parse({{"rank_pattern", ranks}}),
              IsStatus(kInvalid, "an object of at most 117 keys"));
}

TEST(ReadTargets, StabilisesEveryRankByItsOwnRoot) {
  const auto config =
      Parse({{"use_rslora", true}, {"rank_pattern", {{"q_proj", 2}}}}).value();
  EXPECT_DOUBLE_EQ(config.ShapeOf(3, TargetModule::kQProj).scale(),
                   16 / std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(config.ShapeOf(3, TargetModule::kUpProj).scale(),
                   16 / std::sqrt(8.0));
}

TEST(ReadTargets, PatternsOfOtherModulesSayNothing) {
  const auto config =
      Parse({{"rank_pattern", {{"v_proj", 2}, {"nothing", 3}}}}).value();
  EXPECT_THAT(config.overrides, IsEmpty());
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
    const std::string text = WritePeftConfig(*config, kShape, {}, "base");
    const auto again = ParsePeftConfig(text, kShape);
    ASSERT_THAT(again, IsOk()) << text;
    EXPECT_EQ(*again, *config) << text;
  }
}

TEST(WriteTargets, NamesAModuleOnceWhereEveryLayerHasIt) {
  const auto config =
      Parse({{"target_modules", {"up_proj", Q(3), Q(4)}}}).value();
  nlohmann::json root;
  WriteTargets(config, kShape, {}, root);
  EXPECT_THAT(root["target_modules"].get<std::vector<std::string>>(),
              UnorderedElementsAreArray({std::string("up_proj"), Q(3), Q(4)}));
}

}  // namespace
}  // namespace weft::lora::peft_targets_test
