// Tests linear layers with adapters in bf16 arithmetic. The operands are small
// whole numbers, which bf16 holds exactly. So the bounds allow only the
// rounding of f32 sums. A product fails if it sums in bf16 or rounds any other
// operand.
#include "src/lora/lora_bf16.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "src/lora/lora_cpu.h"
#include "src/ops/matmul.h"
#include "tests/lora/odd_widths.h"
#include "tests/support/tensors_near.h"

namespace weft::lora::lora_bf16_test {
namespace {

// Returns numbers from -2 to 2, most of them 0, so that sums stay small.
at::Tensor SmallNumbers(at::IntArrayRef sizes) {
  const at::Tensor is_kept = at::rand(sizes).lt(0.2);
  return at::randint(-2, 3, sizes, at::kFloat).mul_(is_kept);
}

AdapterVersionPtr MakeVersion(int rank) {
  auto version = std::make_shared<AdapterVersion>();
  // The scale alpha / rank is 2, so scaling is exact.
  version->layout = std::make_shared<AdapterLayout>(
      kShape, LoraConfig{.rank = rank, .alpha = 2.0 * rank});
  version->weights_N = SmallNumbers({version->layout->num_parameters()});
  version->compute_N = version->weights_N;
  return version;
}

struct Problem {
  LoraSite site;
  LoraRouting routing;
  BaseLinear base;
  at::Tensor x_TI, dy_TO;
};

// Lays out the segments in order. Puts three rows without an adapter before
// each segment.
Problem MakeProblem(LoraSite site, const std::vector<int64_t>& sizes,
                    const std::vector<AdapterVersionPtr>& versions) {
  at::manual_seed(5);
  Problem problem{.site = site,
                  .routing = SideBySide(sizes, versions, /*gap=*/3)};
  // Makes enough rows that the base's product is in bf16.
  const int64_t rows = std::max<int64_t>(problem.routing.back().end, 40);
  const auto [in, out] = OddWidthsOf(site);
  const bool has_bias = site.group == ProjectionGroup::kQkv;
  problem.x_TI = SmallNumbers({rows, in});
  problem.dy_TO = SmallNumbers({rows, out});
  problem.base = {.weight_OI = SmallNumbers({out, in}).to(at::kBFloat16),
                  .bias_O = has_bias ? SmallNumbers({out}) : at::Tensor()};
  return problem;
}

struct Result {
  at::Tensor y_TO, dx_TI;
  ShrunkInputs shrunk;
  LoraGradients gradients;
};

Result Evaluate(const Problem& p) {
  Result result{.gradients = ZeroGradients(VersionsOf(p.routing), at::kCPU)};
  const LoraPass pass{.routing = p.routing, .shape = kShape};
  result.y_TO = LoraLinear(p.x_TI, p.base, pass, p.site, &result.shrunk);
  result.dx_TI =
      LoraLinearBackward(p.dy_TO, p.x_TI, p.base, pass, p.site, result.shrunk,
                         result.gradients, /*want_input_gradient=*/true);
  return result;
}

// Compares y and dx with the formulas in f64.
void ExpectMatchesTheFormula(const Problem& p) {
  const Result actual = Evaluate(p);
  const at::Tensor weight_OI = p.base.weight_OI.to(at::kDouble);
  at::Tensor y_TO = at::mm(p.x_TI.to(at::kDouble), weight_OI.t());
  if (p.base.bias_O.defined()) y_TO.add_(p.base.bias_O);
  at::Tensor dx_TI = at::mm(p.dy_TO.to(at::kDouble), weight_OI);
  for (const LoraSegment& segment : p.routing) {
    const AdapterVersion& version = *segment.version;
    const at::Tensor weights_N = version.weights_N.to(at::kDouble);
    const auto rows = [&](const at::Tensor& all) {
      return all.slice(0, segment.begin, segment.end);
    };
    for (const LoraFactor& factor : GroupOf(segment, p.site).factors) {
      const at::Tensor a = version.A(weights_N, factor);
      const at::Tensor b = version.B(weights_N, factor);
      const int64_t column = LoraSite::ColumnOf(factor.module, kShape);
      const at::Tensor s = at::mm(rows(p.x_TI).to(at::kDouble), a.t());
      const at::Tensor ds =
          at::mm(rows(p.dy_TO).narrow(1, column, factor.out).to(at::kDouble),
                 b) *
          factor.scale;
      // bf16 holds whole numbers up to 256 exactly.
      ASSERT_LE((s.abs().max() * factor.scale).item<double>(), 256);
      ASSERT_LE(ds.abs().max().item<double>(), 256);
      rows(y_TO)
          .narrow(1, column, factor.out)
          .add_(at::mm(s, b.t()), factor.scale);
      rows(dx_TI).add_(at::mm(ds, a));
    }
  }
  ExpectNear(actual.y_TO, y_TO, kEpsilonF32, p.x_TI.size(1), "y");
  ExpectNear(actual.dx_TI, dx_TI, kEpsilonF32, p.dy_TO.size(1), "dx");
}

class LoraBf16Test : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!ops::AllowBf16Products(true)) {
      GTEST_SKIP() << "this processor lacks AVX512_BF16";
    }
  }
  void TearDown() override { ops::AllowBf16Products(false); }
};

TEST_F(LoraBf16Test, MatchesTheFormulaForSegmentsOfEverySize) {
  for (const LoraSite& site : {kQkv, kDown}) {
    for (const int64_t rows : {1, 32, 33, 100, 700}) {
      for (const int rank : {1, 5, 16, 70}) {
        SCOPED_TRACE(::testing::Message() << rows << " rows, rank " << rank);
        ExpectMatchesTheFormula(MakeProblem(site, {rows}, {MakeVersion(rank)}));
      }
    }
  }
}

TEST_F(LoraBf16Test, MatchesTheFormulaForManyAdapters) {
  const AdapterVersionPtr one = MakeVersion(3), other = MakeVersion(20);
  for (const LoraSite& site : {kQkv, kDown}) {
    ExpectMatchesTheFormula(
        MakeProblem(site, {40, 9, 130, 50}, {one, other, one, MakeVersion(8)}));
  }
}

TEST_F(LoraBf16Test, AnAdapterHasTheSameBitsAloneAndWithAnyNumberOfThreads) {
  const std::vector<AdapterVersionPtr> versions = {
      MakeVersion(8), MakeVersion(3), MakeVersion(20)};
  Problem all = MakeProblem(kQkv, {100, 64, 300}, versions);
  all.x_TI = at::randn(all.x_TI.sizes());
  all.dy_TO = at::randn(all.dy_TO.sizes());
  const Result together = Evaluate(all);
  const int num_threads = at::get_num_threads();
  for (size_t i = 0; i < versions.size(); ++i) {
    const auto [begin, end, version] = all.routing[i];
    Problem alone = all;
    alone.x_TI = all.x_TI.slice(0, begin, end).clone();
    alone.dy_TO = all.dy_TO.slice(0, begin, end).clone();
    alone.routing = {{.begin = 0, .end = end - begin, .version = version}};
    for (const int threads : {1, 2, 5}) {
      at::set_num_threads(threads);
      const Result result = Evaluate(alone);
      EXPECT_TRUE(at::equal(result.y_TO, together.y_TO.slice(0, begin, end)));
      EXPECT_TRUE(at::equal(result.dx_TI, together.dx_TI.slice(0, begin, end)));
      EXPECT_TRUE(at::equal(result.gradients[0].gradient_N,
                            together.gradients[i].gradient_N));
    }
    at::set_num_threads(num_threads);
  }
}

// With recomputation, the backward pass calls LoraShrink in place of the
// forward pass.
TEST_F(LoraBf16Test, ShrinkHasTheBitsOfTheForwardPass) {
  Problem p = MakeProblem(kDown, {100, 7}, {MakeVersion(5), MakeVersion(16)});
  p.x_TI = at::randn(p.x_TI.sizes());
  const ShrunkInputs alone = LoraShrink(
      p.x_TI, p.base, {.routing = p.routing, .shape = kShape}, p.site);
  const Result result = Evaluate(p);
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_TRUE(at::equal(alone[i], result.shrunk[i]));
  }
}

TEST_F(LoraBf16Test, GradientsAreThoseOfF32) {
  Problem p = MakeProblem(kQkv, {100, 7}, {MakeVersion(5), MakeVersion(16)});
  p.x_TI = at::randn(p.x_TI.sizes());
  p.dy_TO = at::randn(p.dy_TO.sizes());
  const Result result = Evaluate(p);
  const LoraGradients gradients =
      ZeroGradients(VersionsOf(p.routing), at::kCPU);
  cpu::Backward(p.dy_TO, p.x_TI, {.routing = p.routing, .shape = kShape},
                p.site, result.shrunk, gradients, /*dx_TI=*/{});
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(
        at::equal(result.gradients[i].gradient_N, gradients[i].gradient_N));
  }
}

TEST_F(LoraBf16Test, NanStaysInItsRow) {
  Problem p = MakeProblem(kQkv, {100}, {MakeVersion(5)});
  p.x_TI[50][3] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor is_nan_T = Evaluate(p).y_TO.isnan().any(1);
  EXPECT_EQ(is_nan_T.sum().item<int64_t>(), 1);
  EXPECT_TRUE(is_nan_T[50].item<bool>());
}

}  // namespace
}  // namespace weft::lora::lora_bf16_test
