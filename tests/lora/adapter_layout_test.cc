#include "src/lora/adapter_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace weft::lora::adapter_layout_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// All widths differ, so that none can be mistaken for another.
constexpr model_config::ModelShape kShape = {.num_layers = 2,
                                             .hidden = 5,
                                             .q_width = 7,
                                             .kv_width = 3,
                                             .ffn = 11,
                                             .vocab = 13};
constexpr int kRank = 2;

LoraConfig Targets(std::vector<TargetModule> modules) {
  return {.rank = kRank, .target_modules = std::move(modules)};
}

LoraConfig AllTargets() {
  LoraConfig config = Targets(DefaultTargetModules());
  config.target_modules.push_back(TargetModule::kLmHead);
  config.target_modules.push_back(TargetModule::kEmbedTokens);
  return config;
}

std::vector<TargetModule> ModulesOf(const GroupLayout& group) {
  std::vector<TargetModule> modules;
  for (const LoraFactor& factor : group.factors) {
    modules.push_back(factor.module);
  }
  return modules;
}

// The offsets are in the order in which the header lists the matrices of a
// layer.
TEST(AdapterLayoutTest, LaysALayerOutAsTheHeaderSays) {
  const AdapterLayout layout(kShape, AllTargets());
  const std::vector<LoraFactor>& factors = layout.factors();
  ASSERT_EQ(factors.size(), 16u);
  const LoraFactor &q = factors[0], &k = factors[1], &v = factors[2];
  const LoraFactor &o = factors[3], &gate = factors[4], &up = factors[5];
  const LoraFactor& down = factors[6];
  int64_t offset = 0;
  const auto expect_next = [&](int64_t actual, int64_t size) {
    EXPECT_EQ(actual, offset);
    offset += size;
  };
  for (const LoraFactor& factor : {q, k, v}) expect_next(factor.a_offset, 10);
  expect_next(q.b_offset, 7 * kRank);
  expect_next(k.b_offset, 3 * kRank);
  expect_next(v.b_offset, 3 * kRank);
  expect_next(o.a_offset, 7 * kRank);
  expect_next(o.b_offset, 5 * kRank);
  for (const LoraFactor& factor : {gate, up}) expect_next(factor.a_offset, 10);
  for (const LoraFactor& factor : {gate, up}) {
    expect_next(factor.b_offset, 11 * kRank);
  }
  expect_next(down.a_offset, 11 * kRank);
  expect_next(down.b_offset, 5 * kRank);
  EXPECT_EQ(factors[7].a_offset, offset);
  EXPECT_EQ(factors[7].layer, 1);
}

TEST(AdapterLayoutTest, GivesEveryFloatToExactlyOneMatrix) {
  for (const LoraConfig& config :
       {AllTargets(), Targets({TargetModule::kVProj, TargetModule::kUpProj})}) {
    const AdapterLayout layout(kShape, config);
    std::vector<int> owners(layout.num_parameters(), 0);
    for (const LoraFactor& factor : layout.factors()) {
      for (int64_t i = 0; i < kRank * factor.in; ++i) {
        ++owners.at(factor.a_offset + i);
      }
      for (int64_t i = 0; i < kRank * factor.out; ++i) {
        ++owners.at(factor.b_offset + i);
      }
    }
    EXPECT_THAT(owners, Each(1));
  }
}

TEST(AdapterLayoutTest, TakesWidthsFromTheProjection) {
  const AdapterLayout layout(kShape, AllTargets());
  std::vector<std::pair<int64_t, int64_t>> widths;
  for (size_t i = 0; i < 7; ++i) {
    widths.emplace_back(layout.factors()[i].in, layout.factors()[i].out);
  }
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_THAT(widths,
              ElementsAre(Pair(5, 7), Pair(5, 3), Pair(5, 3), Pair(7, 5),
                          Pair(5, 11), Pair(5, 11), Pair(11, 5)));
  // Factor 14 belongs to the head, and factor 15 to the embedding.
  EXPECT_EQ(layout.factors()[14].in, 5);
  EXPECT_EQ(layout.factors()[14].out, 13);
  EXPECT_EQ(layout.factors()[15].in, 13);
  EXPECT_EQ(layout.factors()[15].out, 5);
}

TEST(AdapterLayoutTest, GroupsTheProjectionsThatShareAnInput) {
  const AdapterLayout layout(kShape, AllTargets());
  for (int layer = 0; layer < kShape.num_layers; ++layer) {
    const auto modules = [&](ProjectionGroup group) {
      return ModulesOf(layout.group(layer, group));
    };
    EXPECT_THAT(modules(ProjectionGroup::kQkv),
                ElementsAre(TargetModule::kQProj, TargetModule::kKProj,
                            TargetModule::kVProj));
    EXPECT_THAT(modules(ProjectionGroup::kO),
                ElementsAre(TargetModule::kOProj));
    EXPECT_THAT(modules(ProjectionGroup::kGateUp),
                ElementsAre(TargetModule::kGateProj, TargetModule::kUpProj));
    EXPECT_THAT(modules(ProjectionGroup::kDown),
                ElementsAre(TargetModule::kDownProj));
    for (const LoraFactor& factor :
         layout.group(layer, ProjectionGroup::kQkv).factors) {
      EXPECT_EQ(factor.layer, layer);
    }
  }
}

// Layer 1 has a gated delta rule.
model_config::ModelShape WithDelta(bool is_fused) {
  model_config::ModelShape shape = kShape;
  shape.delta = {.layers = {false, true},
                 .key_heads = 1,
                 .value_heads = 2,
                 .key_features = 4,
                 .value_features = 3,
                 .is_fused = is_fused};
  return shape;
}

TEST(AdapterLayoutTest, ALayerWithADeltaRuleHasItsOwnProjections) {
  using enum TargetModule;
  for (const bool is_fused : {false, true}) {
    const model_config::ModelShape shape = WithDelta(is_fused);
    const AdapterLayout layout(
        shape, Targets({kAllTargetModules.begin(), kAllTargetModules.end()}));
    const LayerGroups groups = GroupsOf(shape, 1);
    EXPECT_THAT(ModulesOf(layout.group(0, ProjectionGroup::kQkv)),
                ElementsAre(kQProj, kKProj, kVProj));
    const auto inputs = ModulesOf(layout.group(1, groups[0]));
    if (is_fused) {
      EXPECT_THAT(inputs, ElementsAre(kInProjQkvz, kInProjBa));
    } else {
      EXPECT_THAT(inputs,
                  ElementsAre(kInProjQkv, kInProjZ, kInProjB, kInProjA));
    }
    EXPECT_THAT(ModulesOf(layout.group(1, groups[1])), ElementsAre(kOutProj));
    EXPECT_THAT(ModulesOf(layout.group(1, ProjectionGroup::kDown)),
                ElementsAre(kDownProj));
    EXPECT_EQ(ProjectionsOf(shape).size(), is_fused ? 10u : 12u);
  }
  EXPECT_EQ(ProjectionsOf(kShape), DefaultTargetModules());
  const model_config::ModelShape shape = WithDelta(false);
  EXPECT_EQ(OutWidth(shape, kInProjQkv), 14);
  EXPECT_EQ(InWidth(shape, kOutProj), 6);
  EXPECT_EQ(ModulePath({.layer = 1, .module = kInProjB}),
            "model.layers.1.linear_attn.in_proj_b");
}

TEST(AdapterLayoutTest, OutputGatesWidenTheQueries) {
  model_config::ModelShape shape = kShape;
  shape.gate_width = 7;
  EXPECT_EQ(OutWidth(shape, TargetModule::kQProj), 14);
  EXPECT_EQ(InWidth(shape, TargetModule::kOProj), 7);
}

TEST(AdapterLayoutTest, PutsTheHeadLastInALayerOfItsOwn) {
  const AdapterLayout layout(kShape, AllTargets());
  const GroupLayout& head =
      layout.group(kShape.num_layers, ProjectionGroup::kLmHead);
  ASSERT_THAT(ModulesOf(head), ElementsAre(TargetModule::kLmHead));
  EXPECT_EQ(head.factors[0].layer, kShape.num_layers);
  const GroupLayout& embedding =
      layout.group(kShape.num_layers, ProjectionGroup::kEmbedTokens);
  EXPECT_THAT(ModulesOf(embedding), ElementsAre(TargetModule::kEmbedTokens));
  EXPECT_EQ(embedding.factors[0].layer, kShape.num_layers);
  EXPECT_EQ(head.factors[0].b_offset + kRank * kShape.vocab,
            embedding.factors[0].a_offset);
  EXPECT_EQ(embedding.factors[0].b_offset + kRank * kShape.hidden,
            layout.num_parameters());
}

TEST(AdapterLayoutTest, ModulesThatAreNotTargetedTakeNoRoom) {
  const AdapterLayout layout(
      kShape, Targets({TargetModule::kQProj, TargetModule::kVProj}));
  EXPECT_EQ(layout.num_parameters(), 2 * kRank * (5 + 7 + 5 + 3));
  EXPECT_THAT(ModulesOf(layout.group(1, ProjectionGroup::kQkv)),
              ElementsAre(TargetModule::kQProj, TargetModule::kVProj));
  // The A matrices stay adjacent although k, which was between them, is left
  // out.
  const std::vector<LoraFactor>& qv =
      layout.group(1, ProjectionGroup::kQkv).factors;
  EXPECT_EQ(qv[1].a_offset, qv[0].a_offset + kRank * kShape.hidden);
  for (const ProjectionGroup group :
       {ProjectionGroup::kO, ProjectionGroup::kGateUp, ProjectionGroup::kDown,
        ProjectionGroup::kLmHead, ProjectionGroup::kEmbedTokens}) {
    EXPECT_THAT(layout.group(1, group).factors, IsEmpty());
  }
}

TEST(AdapterLayoutTest, GivesEveryLayerItsRankAndScale) {
  LoraConfig config =
      Targets({TargetModule::kQProj, TargetModule::kVProj});  // Has alpha 32.
  config.overrides = {{0, TargetModule::kVProj, {.rank = 4, .alpha = 2}},
                      {1, TargetModule::kQProj, {}}};
  const AdapterLayout layout(kShape, config);
  EXPECT_EQ(layout.max_rank(), 4);
  const GroupLayout& both = layout.group(0, ProjectionGroup::kQkv);
  ASSERT_EQ(both.factors.size(), 2u);
  EXPECT_EQ(both.total_rank, kRank + 4);
  EXPECT_EQ(both.factors[0].scale, 16);
  EXPECT_EQ(both.factors[1].scale, 0.5);
  // The A matrices are adjacent, whatever their ranks.
  EXPECT_EQ(both.factors[1].a_offset, kRank * 5);
  EXPECT_EQ(both.factors[0].b_offset, (kRank + 4) * 5);
  EXPECT_EQ(both.factors[1].b_offset, (kRank + 4) * 5 + 7 * kRank);
  EXPECT_THAT(ModulesOf(layout.group(1, ProjectionGroup::kQkv)),
              ElementsAre(TargetModule::kVProj));
  EXPECT_EQ(layout.num_parameters(), (5 + 7) * kRank + (5 + 3) * (4 + kRank));
}

TEST(AdapterLayoutTest, DoesNotDependOnTheOrderOfTheTargets) {
  const AdapterLayout forward(
      kShape, Targets({TargetModule::kQProj, TargetModule::kDownProj}));
  const AdapterLayout backward(
      kShape, Targets({TargetModule::kDownProj, TargetModule::kQProj}));
  ASSERT_EQ(forward.factors().size(), backward.factors().size());
  for (size_t i = 0; i < forward.factors().size(); ++i) {
    EXPECT_EQ(forward.factors()[i].module, backward.factors()[i].module);
    EXPECT_EQ(forward.factors()[i].a_offset, backward.factors()[i].a_offset);
  }
}

TEST(AdapterLayoutTest, AModelWithoutLayersHasHeadAndEmbedding) {
  model_config::ModelShape shape = kShape;
  shape.num_layers = 0;
  const AdapterLayout layout(shape, AllTargets());
  ASSERT_EQ(layout.factors().size(), 2u);
  EXPECT_EQ(layout.num_parameters(), 2 * kRank * (5 + 13));
  EXPECT_THAT(ModulesOf(layout.group(0, ProjectionGroup::kLmHead)),
              ElementsAre(TargetModule::kLmHead));
  EXPECT_THAT(ModulesOf(layout.group(0, ProjectionGroup::kEmbedTokens)),
              ElementsAre(TargetModule::kEmbedTokens));
}

TEST(ModulePathTest, IsThePathOfHuggingFace) {
  std::vector<std::string> paths;
  const AdapterLayout layout(kShape, AllTargets());
  for (size_t i = 7; i < layout.factors().size(); ++i) {
    paths.push_back(ModulePath(layout.factors()[i]));
  }
  EXPECT_THAT(
      paths,
      ElementsAre(
          "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj",
          "model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj",
          "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj",
          "model.layers.1.mlp.down_proj", "lm_head", "model.embed_tokens"));
}

}  // namespace
}  // namespace weft::lora::adapter_layout_test
