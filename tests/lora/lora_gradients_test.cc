#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>

#include "src/lora/adapter.h"

namespace weft::lora::lora_gradients_test {
namespace {

AdapterVersionPtr MakeVersion(int rank) {
  auto version = std::make_shared<AdapterVersion>();
  version->layout = std::make_shared<AdapterLayout>(
      model_config::ModelShape{.num_layers = 1, .hidden = 4, .q_width = 6},
      LoraConfig{.rank = rank, .target_modules = {TargetModule::kQProj}});
  return version;
}

TEST(LoraGradientsTest, StartAtZeroInTheShapesOfTheirVersions) {
  const AdapterVersionPtr first = MakeVersion(1), second = MakeVersion(3);
  const LoraGradients gradients = ZeroGradients({first, second}, at::kCPU);
  ASSERT_EQ(gradients.size(), 2);
  EXPECT_EQ(gradients[0].version, first);
  EXPECT_TRUE(at::equal(gradients[0].gradient_N, at::zeros({4 + 6})));
  EXPECT_TRUE(at::equal(gradients[1].gradient_N, at::zeros({3 * (4 + 6)})));
}

TEST(LoraGradientsTest, AreFoundByTheirVersion) {
  const AdapterVersionPtr first = MakeVersion(2), second = MakeVersion(2);
  const LoraGradients gradients = ZeroGradients({first, second}, at::kCPU);
  EXPECT_TRUE(GradientOf(gradients, second).is_same(gradients[1].gradient_N));
  EXPECT_FALSE(GradientOf(gradients, MakeVersion(2)).defined());
}

}  // namespace
}  // namespace weft::lora::lora_gradients_test
