#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "src/lora/adapter.h"

namespace weft::lora::lora_init_test {
namespace {

constexpr model_config::ModelShape kShape = {.num_layers = 3,
                                             .hidden = 64,
                                             .q_width = 48,
                                             .kv_width = 16,
                                             .ffn = 96,
                                             .vocab = 80};

LoraConfig Config(std::vector<TargetModule> modules = DefaultTargetModules()) {
  return {.rank = 16, .target_modules = std::move(modules)};
}

std::vector<float> AOf(const std::vector<float>& weights,
                       const LoraFactor& factor) {
  const auto begin = weights.begin() + factor.a_offset;
  return {begin, begin + factor.rank * factor.in};
}

TEST(InitialWeightsTest, AreTheSameForTheSameSeed) {
  const AdapterLayout layout(kShape, Config());
  EXPECT_EQ(InitialWeights(layout, 7), InitialWeights(layout, 7));
}

TEST(InitialWeightsTest, StartEveryBAtZero) {
  const AdapterLayout layout(kShape, Config());
  const std::vector<float> weights = InitialWeights(layout, 7);
  for (const LoraFactor& factor : layout.factors()) {
    for (int64_t i = 0; i < factor.out * factor.rank; ++i) {
      ASSERT_EQ(weights[factor.b_offset + i], 0.0f);
    }
  }
}

TEST(InitialWeightsTest, DrawEveryAUniformlyInsideTheBoundOfPeft) {
  const AdapterLayout layout(kShape, Config());
  const std::vector<float> weights = InitialWeights(layout, 7);
  for (const LoraFactor& factor : layout.factors()) {
    const double bound = 1.0 / std::sqrt(static_cast<double>(factor.in));
    double sum = 0, sum_of_squares = 0;
    const std::vector<float> a = AOf(weights, factor);
    for (const float value : a) {
      ASSERT_LE(std::abs(value), static_cast<float>(bound));
      sum += value / bound;
      sum_of_squares += (value / bound) * (value / bound);
    }
    // U(-1, 1) has mean 0 with variance 1/3, and mean square 1/3 with variance
    // 4/45. The bound is six standard errors, which one seed in 10^8 exceeds.
    const auto n = static_cast<double>(a.size());
    EXPECT_LE(std::abs(sum / n), 6 * std::sqrt(1.0 / 3 / n));
    EXPECT_LE(std::abs(sum_of_squares / n - 1.0 / 3),
              6 * std::sqrt(4.0 / 45 / n));
  }
}

TEST(InitialWeightsTest, DrawBOfTheEmbeddingAndStartItsAAtZero) {
  const AdapterLayout layout(kShape, Config({TargetModule::kEmbedTokens}));
  const std::vector<float> weights = InitialWeights(layout, 7);
  const LoraFactor& factor = layout.factors()[0];
  for (const float value : AOf(weights, factor)) ASSERT_EQ(value, 0.0f);
  double sum = 0, sum_of_squares = 0, sum_of_fourths = 0;
  const int64_t n = factor.out * factor.rank;
  for (int64_t i = 0; i < n; ++i) {
    const double value = weights[factor.b_offset + i];
    sum += value;
    sum_of_squares += value * value;
    sum_of_fourths += value * value * value * value;
  }
  // N(0, 1) has the moments 0, 1 and 3 with variances 1, 2 and 96. The bound is
  // six standard errors, which one seed in 10^8 exceeds.
  EXPECT_LE(std::abs(sum / n), 6 * std::sqrt(1.0 / n));
  EXPECT_LE(std::abs(sum_of_squares / n - 1), 6 * std::sqrt(2.0 / n));
  EXPECT_LE(std::abs(sum_of_fourths / n - 3), 6 * std::sqrt(96.0 / n));
}

TEST(InitialWeightsTest, DifferBetweenSeedsLayersAndModules) {
  const AdapterLayout layout(kShape, Config());
  // Compares the first 8 draws of all matrices, to find a repeated sequence.
  // Multiplies each draw by sqrt(in), because the matrices have different
  // bounds.
  std::set<std::vector<int64_t>> seen;
  int drawn = 0;
  for (const uint64_t seed : {0u, 1u, 2u}) {
    const std::vector<float> weights = InitialWeights(layout, seed);
    for (const LoraFactor& factor : layout.factors()) {
      std::vector<int64_t> start;
      for (int64_t i = 0; i < 8; ++i) {
        const double relative = weights[factor.a_offset + i] *
                                std::sqrt(static_cast<double>(factor.in));
        start.push_back(std::llround(relative * 1e5));
      }
      seen.insert(start);
      ++drawn;
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), drawn);
}

TEST(InitialWeightsTest, DoNotRepeatInsideAMatrix) {
  const AdapterLayout layout(kShape, Config());
  const std::vector<float> weights = InitialWeights(layout, 3);
  const std::vector<float> a = AOf(weights, layout.factors()[0]);
  const std::vector<float> first_row(a.begin(), a.begin() + kShape.hidden);
  for (int row = 1; row < layout.factors()[0].rank; ++row) {
    const auto begin = a.begin() + row * kShape.hidden;
    EXPECT_NE(first_row, std::vector<float>(begin, begin + kShape.hidden));
  }
}

TEST(InitialWeightsTest, OfAnAdapterWithFewerTargetsOrLayersAreTheSame) {
  const AdapterLayout full(kShape, Config());
  model_config::ModelShape shallow = kShape;
  shallow.num_layers = 1;
  const AdapterLayout few(
      shallow, Config({TargetModule::kVProj, TargetModule::kUpProj}));
  const std::vector<float> full_weights = InitialWeights(full, 11);
  const std::vector<float> few_weights = InitialWeights(few, 11);
  int compared = 0;
  for (const LoraFactor& factor : few.factors()) {
    for (const LoraFactor& other : full.factors()) {
      if (other.layer != factor.layer || other.module != factor.module) {
        continue;
      }
      EXPECT_EQ(AOf(few_weights, factor), AOf(full_weights, other));
      ++compared;
    }
  }
  EXPECT_EQ(compared, 2);
}

TEST(InitialWeightsTest, OfAnEmptyLayoutAreEmpty) {
  model_config::ModelShape shape = kShape;
  shape.num_layers = 0;
  const AdapterLayout layout(shape, Config());
  EXPECT_TRUE(InitialWeights(layout, 1).empty());
}

}  // namespace
}  // namespace weft::lora::lora_init_test
