#include "src/ops/gated_product.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>

#include "tests/support/tensors_near.h"

namespace weft::ops::gated_product_test {
namespace {

at::Tensor Expected(Activation activation, const at::Tensor& gate,
                    const at::Tensor& up) {
  if (activation == Activation::kSilu) return at::silu(gate) * up;
  if (activation == Activation::kGeluTanh) return at::gelu(gate, "tanh") * up;
  const at::Tensor x = gate.clamp_max(7);
  return x * (x * 1.702).sigmoid() * (up.clamp(-7, 7) + 1);
}

class GatedProductTest
    : public ::testing::TestWithParam<std::tuple<at::ScalarType, Activation>> {
};

TEST_P(GatedProductTest, MatchesAutograd) {
  const auto [dtype, activation] = GetParam();
  at::manual_seed(3);
  for (int64_t rows : {0, 1, 29}) {
    for (int64_t features : {1, 13, 64, 1537}) {
      at::Tensor gate_up =
          (at::randn({rows, 2 * features}, at::kDouble) * 3).to(dtype);
      const at::Tensor dout =
          at::randn({rows, features}, at::kDouble).to(dtype);
      at::Tensor leaf =
          gate_up.to(at::kDouble).detach().clone().requires_grad_(true);
      const at::Tensor gate = leaf.narrow(1, 0, features);
      const at::Tensor y =
          Expected(activation, gate, leaf.narrow(1, features, features));
      (y * dout.to(at::kDouble)).sum().backward();
      const at::Tensor out = GatedProduct(activation, gate_up);
      GatedProductBackward(activation, dout, gate_up);
      const double tolerance = Tolerance(EpsilonOf(dtype), 1, 150);
      EXPECT_TRUE(at::allclose(out.to(at::kDouble), y.detach(), 0, tolerance));
      EXPECT_TRUE(
          at::allclose(gate_up.to(at::kDouble), leaf.grad(), 0, tolerance));
    }
  }
}

std::string CaseName(
    const ::testing::TestParamInfo<GatedProductTest::ParamType>& test) {
  const auto& [dtype, activation] = test.param;
  return std::string(c10::toString(dtype)) +
         (activation == Activation::kSilu       ? "_Silu"
          : activation == Activation::kGeluTanh ? "_GeluTanh"
                                                : "_ClampedSilu");
}

INSTANTIATE_TEST_SUITE_P(
    EveryDtype, GatedProductTest,
    ::testing::Combine(
        ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16),
        ::testing::Values(Activation::kSilu, Activation::kGeluTanh,
                          Activation::kClampedSilu)),
    CaseName);

TEST(GatedProductNanTest, StaysInItsElement) {
  at::Tensor gate_up = at::ones({3, 40});
  gate_up[1][5] = std::nan("");
  for (const Activation activation :
       {Activation::kSilu, Activation::kGeluTanh, Activation::kClampedSilu}) {
    const at::Tensor out = GatedProduct(activation, gate_up);
    EXPECT_TRUE(out[1][5].isnan().item<bool>());
    EXPECT_EQ(out.isnan().sum().item<int64_t>(), 1);
  }
}

}  // namespace
}  // namespace weft::ops::gated_product_test
