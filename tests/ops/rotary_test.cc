#include "src/ops/rotary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "src/ops/rms_norm.h"
#include "tests/support/dtype_name.h"
#include "tests/support/tolerance.h"

namespace weft::ops::rotary_test {
namespace {

RotaryTable MakeTable(int64_t features, int64_t positions) {
  std::vector<double> frequencies(features / 2);
  for (size_t c = 0; c < frequencies.size(); ++c) {
    frequencies[c] = std::pow(10000.0, -2.0 * c / features);
  }
  return MakeRotaryTable(frequencies, positions, at::kCPU);
}

// Computes Hugging Face's form x cos + rotate_half(x) sin in f64.
at::Tensor Dense(const at::Tensor& x, const at::Tensor& positions,
                 const RotaryTable& table) {
  const int64_t half = x.size(2) / 2;
  const at::Tensor rows = positions.to(at::kLong);
  const at::Tensor cos = table.cos_PC.index_select(0, rows).to(at::kDouble);
  const at::Tensor sin = table.sin_PC.index_select(0, rows).to(at::kDouble);
  const at::Tensor rotated =
      at::cat({-x.narrow(2, half, half), x.narrow(2, 0, half)}, 2);
  return x * at::cat({cos, cos}, 1).unsqueeze(1) +
         rotated * at::cat({sin, sin}, 1).unsqueeze(1);
}

class RotaryTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(RotaryTest, MatchesDenseFormAndItsInverseIsTheBackward) {
  const at::ScalarType dtype = GetParam();
  const double epsilon = dtype == at::kBFloat16 ? kEpsilonBf16 : kEpsilonF32;
  at::manual_seed(2);
  for (int64_t tokens : {0, 1, 37}) {
    for (int64_t features : {2, 34, 64}) {
      const RotaryTable table = MakeTable(features, 50);
      const at::Tensor positions = at::randint(0, 50, {tokens}, at::kInt);
      // x has three heads inside a fused projection of five.
      at::Tensor fused =
          at::randn({tokens, 5, features}, at::kDouble).to(dtype);
      const at::Tensor before = fused.clone();
      at::Tensor x = fused.narrow(1, 1, 3);
      at::Tensor leaf = before.narrow(1, 1, 3)
                            .to(at::kDouble)
                            .detach()
                            .clone()
                            .requires_grad_(true);
      const at::Tensor y = Dense(leaf, positions, table);
      at::Tensor k = x.narrow(1, 1, 2).clone();
      const Heads heads = {.q_TQC = x, .k_TKC = k};
      PrepareHeads(heads, positions, table, {}, {});
      EXPECT_TRUE(at::equal(k, x.narrow(1, 1, 2)));
      EXPECT_TRUE(at::allclose(x.to(at::kDouble), y.detach(), 0,
                               Tolerance(epsilon, 2, 6)));
      EXPECT_TRUE(at::equal(fused.narrow(1, 0, 1), before.narrow(1, 0, 1)));
      EXPECT_TRUE(at::equal(fused.narrow(1, 4, 1), before.narrow(1, 4, 1)));
      at::Tensor gradient =
          at::randn({tokens, 3, features}, at::kDouble).to(dtype);
      (y * gradient.to(at::kDouble)).sum().backward();
      const Heads d_heads = {.q_TQC = gradient,
                             .k_TKC = gradient.narrow(1, 0, 1).clone(),
                             .v_TKC = before};
      PrepareHeadsBackward(d_heads, positions, table, {}, {}, d_heads);
      EXPECT_TRUE(at::equal(d_heads.k_TKC, gradient.narrow(1, 0, 1)));
      EXPECT_TRUE(at::allclose(gradient.to(at::kDouble), leaf.grad(), 0,
                               Tolerance(epsilon, 2, 6)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, RotaryTest,
                         ::testing::Values(at::kFloat, at::kDouble,
                                           at::kBFloat16),
                         weft::testing::DtypeName);

TEST(RotaryTableTest, HoldsCosineAndSineOfPositionTimesFrequency) {
  const RotaryTable table = MakeRotaryTable({1.0, 0.25}, 9, at::kCPU);
  EXPECT_FLOAT_EQ(table.cos_PC[8][1].item<float>(), std::cos(2.0F));
  EXPECT_FLOAT_EQ(table.sin_PC[3][0].item<float>(), std::sin(3.0F));
}

TEST(RotaryNanTest, StaysInItsToken) {
  const RotaryTable table = MakeTable(8, 4);
  at::Tensor x = at::ones({3, 2, 8});
  x[1][0][0] = std::nan("");
  PrepareHeads({.q_TQC = x, .k_TKC = at::ones({3, 1, 8})},
               at::tensor({0, 1, 2}, at::kInt), table, {}, {});
  EXPECT_FALSE(x[0].isnan().any().item<bool>());
  EXPECT_FALSE(x[2].isnan().any().item<bool>());
}

// One call does what RmsNorm, the rotation and WriteKvPages do, in this order.
TEST(PrepareHeadsTest, NormsRotatesAndWritesToPages) {
  at::manual_seed(3);
  const RotaryTable table = MakeTable(8, 9);
  const at::Tensor positions = at::tensor({4, 0, 8}, at::kInt);
  const at::Tensor fused = at::randn({3, 6, 8});
  const HeadNorms norms = {at::randn({8}), at::randn({8}), 1e-5};
  const auto split = [](const at::Tensor& x) {
    return Heads{x.narrow(1, 0, 2), x.narrow(1, 2, 2), x.narrow(1, 4, 2)};
  };
  const KvSlots slots = {.slots_T = at::tensor({5, -1, 2}, at::kLong),
                         .k_pages_PSKC = at::zeros({3, 2, 2, 8}),
                         .v_pages_PSKC = at::zeros({3, 2, 2, 8})};
  const at::Tensor actual = fused.clone(), expected = fused.clone();
  PrepareHeads(split(actual), positions, table, norms, slots);
  const auto norm = [&](at::Tensor heads_TMC, const at::Tensor& weight) {
    at::Tensor rows = heads_TMC.reshape({-1, 8}).clone();
    RmsNorm(rows, weight, norms.eps, rows);
    heads_TMC.copy_(rows.view_as(heads_TMC));
  };
  norm(expected.narrow(1, 0, 2), norms.q_C);
  norm(expected.narrow(1, 2, 2), norms.k_C);
  PrepareHeads(split(expected), positions, table, {}, {});
  EXPECT_TRUE(at::equal(actual, expected));
  const at::Tensor k = slots.k_pages_PSKC.flatten(0, 1);
  const at::Tensor v = slots.v_pages_PSKC.flatten(0, 1);
  EXPECT_TRUE(at::equal(k[5], expected[0].narrow(0, 2, 2)));
  EXPECT_TRUE(at::equal(v[2], expected[2].narrow(0, 4, 2)));
  for (const int64_t free : {0, 1, 3, 4}) {
    EXPECT_EQ(k[free].abs().sum().item<float>(), 0);
    EXPECT_EQ(v[free].abs().sum().item<float>(), 0);
  }
}

TEST(PrepareHeadsTest, BackwardIsThatOfAutograd) {
  at::manual_seed(4);
  const RotaryTable table = MakeTable(8, 9);
  const at::Tensor positions = at::tensor({4, 0, 8}, at::kInt);
  const HeadNorms norms = {at::randn({8}, at::kDouble),
                           at::randn({8}, at::kDouble), 1e-5};
  const at::Tensor q = at::randn({3, 2, 8}, at::kDouble).requires_grad_(true);
  const at::Tensor normed =
      q * (q.square().mean(2, true) + norms.eps).rsqrt() * norms.q_C;
  const at::Tensor dy = at::randn({3, 2, 8}, at::kDouble);
  (Dense(normed, positions, table) * dy).sum().backward();
  const Heads gradients = {dy, dy.narrow(1, 0, 1).clone(), dy};
  const Heads raw = {q.detach(), q.detach().narrow(1, 0, 1)};
  const Heads into = {at::empty_like(dy), at::empty({3, 1, 8}, at::kDouble),
                      at::empty_like(dy)};
  PrepareHeadsBackward(gradients, positions, table, norms, raw, into);
  EXPECT_TRUE(at::allclose(into.q_TQC, q.grad(), 1e-6, 1e-6));
  EXPECT_TRUE(at::equal(into.v_TKC, dy));
}

// The gradient through the norms has the bits of RmsNormBackward, with each
// head as a row. The heads are strided views and have more tokens than one task
// takes.
TEST(PrepareHeadsTest, BackwardHasTheBitsOfRmsNormBackward) {
  at::manual_seed(5);
  constexpr int64_t kTokens = 400, kFeatures = 34;
  const RotaryTable table = MakeTable(kFeatures, 9);
  const at::Tensor positions = at::randint(0, 9, {kTokens}, at::kInt);
  const HeadNorms norms = {at::randn({kFeatures}), at::randn({kFeatures}),
                           1e-5};
  const auto split = [](const at::Tensor& x) {
    return Heads{x.narrow(1, 0, 3), x.narrow(1, 3, 2), x.narrow(1, 5, 1)};
  };
  const at::Tensor raw = at::randn({kTokens, 6, kFeatures});
  const at::Tensor actual = at::randn({kTokens, 6, kFeatures});
  const at::Tensor expected = actual.clone();
  PrepareHeadsBackward(split(actual), positions, table, norms, split(raw),
                       split(actual));
  PrepareHeadsBackward(split(expected), positions, table, {}, {},
                       split(expected));
  const auto norm = [&](at::Tensor d_TMC, const at::Tensor& x_TMC,
                        const at::Tensor& weight) {
    at::Tensor dx = at::zeros({d_TMC.size(0) * d_TMC.size(1), kFeatures});
    RmsNormBackward(d_TMC.reshape({-1, kFeatures}),
                    x_TMC.reshape({-1, kFeatures}), weight, norms.eps, dx);
    d_TMC.copy_(dx.view(d_TMC.sizes()));
  };
  norm(split(expected).q_TQC, split(raw).q_TQC, norms.q_C);
  norm(split(expected).k_TKC, split(raw).k_TKC, norms.k_C);
  EXPECT_TRUE(at::equal(actual, expected));
}

TEST(RotaryRefusalTest, TableOfAnotherWidthThrows) {
  const RotaryTable table = MakeTable(8, 4);
  at::Tensor x = at::ones({1, 1, 10});
  EXPECT_THROW(PrepareHeads({.q_TQC = x, .k_TKC = x}, at::zeros({1}, at::kInt),
                            table, {}, {}),
               c10::Error);
}

}  // namespace
}  // namespace weft::ops::rotary_test
