#include "src/lora/lora_linear.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/dtype_name.h"
#include "tests/support/tensors_near.h"

namespace weft::lora::lora_linear_test {
namespace {

constexpr model_config::ModelShape kShape = {.num_layers = 2,
                                             .hidden = 24,
                                             .q_width = 32,
                                             .kv_width = 16,
                                             .ffn = 40,
                                             .vocab = 56};
constexpr int64_t kRows = 23;

std::vector<TargetModule> EveryModule() {
  std::vector<TargetModule> modules = DefaultTargetModules();
  modules.push_back(TargetModule::kLmHead);
  return modules;
}

// Makes a version with random weights. B is not zero, because half of the
// gradients would be zero otherwise.
AdapterVersionPtr MakeVersion(int rank, double alpha, at::ScalarType dtype,
                              std::vector<TargetModule> modules,
                              std::vector<LoraOverride> overrides = {}) {
  const LoraConfig config = {.rank = rank,
                             .alpha = alpha,
                             .target_modules = std::move(modules),
                             .overrides = std::move(overrides)};
  auto version = std::make_shared<AdapterVersion>();
  version->number = 1;
  version->layout = std::make_shared<AdapterLayout>(kShape, config);
  const int64_t size = version->layout->num_parameters();
  version->compute_N = (at::randn({size}, at::kDouble) * 0.3).to(dtype);
  version->weights_N = version->compute_N.to(at::kFloat);
  return version;
}

// Makes ranks and scales differ inside a group, and leaves out k in layer 1.
std::vector<LoraOverride> Overrides() {
  return {{0, TargetModule::kQProj, {.rank = 2, .alpha = 6}},
          {0, TargetModule::kVProj, {.rank = 5, .alpha = 1}},
          {0, TargetModule::kUpProj, {.rank = 1, .alpha = 2}},
          {1, TargetModule::kKProj, {}},
          {1, TargetModule::kDownProj, {.rank = 6, .alpha = 9}},
          {2, TargetModule::kLmHead, {.rank = 3, .alpha = 2}}};
}

struct Problem {
  LoraSite site;
  at::Tensor x_TI;
  BaseLinear base;
  LoraRouting routing;
  LoraGradients gradients;  // The gradients before the pass.
  at::Tensor dy_TO;

  at::Tensor Gradient(size_t segment) const {
    return GradientOf(gradients, routing[segment].version);
  }
};

// Returns random sums of gradients, in f64 if `dtype` is f64, otherwise f32.
at::Tensor RandomGradient(const AdapterVersion& version, at::ScalarType dtype) {
  return at::randn({version.layout->num_parameters()},
                   dtype == at::kDouble ? at::kDouble : at::kFloat);
}

std::pair<int64_t, int64_t> WidthsOf(ProjectionGroup group) {
  switch (group) {
    case ProjectionGroup::kQkv:
      return {kShape.hidden, kShape.q_width + 2 * kShape.kv_width};
    case ProjectionGroup::kO:
      return {kShape.q_width, kShape.hidden};
    case ProjectionGroup::kGateUp:
      return {kShape.hidden, 2 * kShape.ffn};
    case ProjectionGroup::kDown:
      return {kShape.ffn, kShape.hidden};
    case ProjectionGroup::kLmHead:
      return {kShape.hidden, kShape.vocab};
    case ProjectionGroup::kEmbedTokens:
      break;  // The embedding is not linear; see lora_embedding_test.cc.
    case ProjectionGroup::kDeltaIn:
    case ProjectionGroup::kDeltaFusedIn:
    case ProjectionGroup::kDeltaOut:
      break;  // The shape has no gated delta rule.
  }
  return {};
}

// Makes 2 rows of the base model, 9 of an adapter of every module, 5 of an
// adapter of some modules, 3 of the base model, 3 of an adapter with
// Overrides(), and 1 of an adapter of the head. If `rows` is below 23, no row
// has an adapter.
Problem MakeProblem(LoraSite site, at::ScalarType dtype, bool with_bias,
                    int64_t rows = kRows) {
  at::manual_seed(11);
  const auto random = [&](std::vector<int64_t> sizes, double scale) {
    return (at::randn(sizes, at::kDouble) * scale).to(dtype);
  };
  const auto [in, out] = WidthsOf(site.group);
  Problem problem{.site = site,
                  .x_TI = random({rows, in}, 1),
                  .base = {.weight_OI = random({out, in}, 0.2)},
                  .dy_TO = random({rows, out}, 1)};
  if (with_bias) problem.base.bias_O = random({out}, 1);
  if (rows < kRows) return problem;
  const AdapterVersionPtr versions[] = {
      MakeVersion(4, 8, dtype, EveryModule()),
      MakeVersion(7, 2, dtype,
                  {TargetModule::kQProj, TargetModule::kVProj,
                   TargetModule::kUpProj, TargetModule::kDownProj}),
      MakeVersion(4, 4, dtype, EveryModule(), Overrides()),
      MakeVersion(3, 3, dtype, {TargetModule::kLmHead})};
  const int64_t ranges[][2] = {{2, 11}, {11, 16}, {19, 22}, {22, 23}};
  for (int i = 0; i < 4; ++i) {
    problem.routing.push_back(
        {.begin = ranges[i][0], .end = ranges[i][1], .version = versions[i]});
    problem.gradients.push_back(
        {.version = versions[i],
         .gradient_N = RandomGradient(*versions[i], dtype)});
  }
  return problem;
}

struct Result {
  at::Tensor y_TO;
  at::Tensor dx_TI;
  std::vector<at::Tensor> gradients;  // One per segment.
};

// Computes the formula in f64 and differentiates it by autograd. The returned
// gradients include problem.gradients.
Result Oracle(const Problem& problem) {
  at::Tensor x = problem.x_TI.to(at::kDouble).clone().requires_grad_(true);
  at::Tensor y = at::mm(x, problem.base.weight_OI.to(at::kDouble).t());
  if (problem.base.bias_O.defined()) {
    y = y + problem.base.bias_O.to(at::kDouble);
  }
  std::vector<at::Tensor> inputs = {x};
  for (const LoraSegment& segment : problem.routing) {
    const AdapterVersion& version = *segment.version;
    at::Tensor flat =
        version.compute_N.to(at::kDouble).clone().requires_grad_(true);
    inputs.push_back(flat);
    const at::Tensor rows = x.slice(0, segment.begin, segment.end);
    for (const LoraFactor& factor :
         version.layout->group(problem.site.layer, problem.site.group)
             .factors) {
      const at::Tensor a =
          flat.narrow(0, factor.a_offset, factor.rank * factor.in)
              .view({factor.rank, factor.in});
      const at::Tensor b =
          flat.narrow(0, factor.b_offset, factor.rank * factor.out)
              .view({factor.out, factor.rank});
      const at::Tensor delta =
          at::mm(at::mm(rows, a.t()), b.t()) * factor.scale;
      const int64_t column = LoraSite::ColumnOf(factor.module, kShape);
      y = y +
          at::constant_pad_nd(delta, {column, y.size(1) - column - factor.out,
                                      segment.begin, y.size(0) - segment.end});
    }
  }
  const auto gradients = torch::autograd::grad(
      {y}, inputs, {problem.dy_TO.to(at::kDouble)}, /*retain_graph=*/{},
      /*create_graph=*/false, /*allow_unused=*/true);
  Result result{.y_TO = y.detach(), .dx_TI = gradients[0]};
  for (size_t i = 0; i < problem.routing.size(); ++i) {
    at::Tensor sum = problem.Gradient(i).to(at::kDouble).clone();
    if (gradients[i + 1].defined()) sum += gradients[i + 1];
    result.gradients.push_back(sum);
  }
  return result;
}

// Runs the tested functions, which add to copies of problem.gradients.
Result Evaluate(const Problem& problem, bool want_input_gradient = true) {
  LoraGradients gradients = problem.gradients;
  for (LoraGradient& gradient : gradients) {
    gradient.gradient_N = gradient.gradient_N.clone();
  }
  Result result;
  ShrunkInputs shrunk;
  const LoraPass pass = {.routing = problem.routing, .shape = kShape};
  result.y_TO =
      LoraLinear(problem.x_TI, problem.base, pass, problem.site, &shrunk);
  EXPECT_EQ(shrunk.size(), problem.routing.size());
  result.dx_TI =
      LoraLinearBackward(problem.dy_TO, problem.x_TI, problem.base, pass,
                         problem.site, shrunk, gradients, want_input_gradient);
  for (const LoraSegment& segment : problem.routing) {
    result.gradients.push_back(GradientOf(gradients, segment.version));
  }
  return result;
}

constexpr LoraSite kSites[] = {
    {0, ProjectionGroup::kQkv},  {1, ProjectionGroup::kQkv},
    {1, ProjectionGroup::kO},    {0, ProjectionGroup::kGateUp},
    {1, ProjectionGroup::kDown}, {2, ProjectionGroup::kLmHead}};

class LoraLinearTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(LoraLinearTest, MatchesAutogradOfTheFormulaInF64) {
  for (const LoraSite& site : kSites) {
    for (const bool with_bias : {false, true}) {
      SCOPED_TRACE("layer " + std::to_string(site.layer) + " group " +
                   std::to_string(static_cast<int>(site.group)));
      const Problem problem = MakeProblem(site, GetParam(), with_bias);
      const Result expected = Oracle(problem);
      const Result actual = Evaluate(problem);
      const double epsilon = EpsilonOf(GetParam());
      const int64_t in = problem.x_TI.size(1);
      const int64_t out = problem.dy_TO.size(1);
      EXPECT_EQ(actual.y_TO.scalar_type(), GetParam());
      ExpectNear(actual.y_TO, expected.y_TO, epsilon, in, "y");
      ExpectNear(actual.dx_TI, expected.dx_TI, epsilon, out, "dx");
      for (size_t i = 0; i < actual.gradients.size(); ++i) {
        ExpectNear(actual.gradients[i], expected.gradients[i], epsilon,
                   std::max(out, kRows), "gradient");
      }
    }
  }
}

// The batch has more rows than the kernels for few rows support.
TEST_P(LoraLinearTest, MatchesTheFormulaForFewAndManyRows) {
  for (const LoraSite& site : kSites) {
    Problem problem = MakeProblem(site, GetParam(), /*with_bias=*/true);
    problem.x_TI = at::cat({problem.x_TI, problem.x_TI});
    problem.dy_TO = at::cat({problem.dy_TO, problem.dy_TO});
    // One segment of many rows is between two of few rows.
    problem.routing.resize(3);
    problem.routing[1].end = 2 * kRows - 1;
    problem.routing[2].begin = 2 * kRows - 1;
    problem.routing[2].end = 2 * kRows;
    const Result expected = Oracle(problem), actual = Evaluate(problem);
    const double epsilon = EpsilonOf(GetParam());
    ExpectNear(actual.y_TO, expected.y_TO, epsilon, problem.x_TI.size(1), "y");
    ExpectNear(actual.dx_TI, expected.dx_TI, epsilon, problem.dy_TO.size(1),
               "dx");
    for (size_t i = 0; i < actual.gradients.size(); ++i) {
      ExpectNear(actual.gradients[i], expected.gradients[i], epsilon,
                 std::max<int64_t>(problem.dy_TO.size(1), 2 * kRows),
                 "gradient");
    }
  }
}

TEST_P(LoraLinearTest, RunsRowsOfNoSegmentThroughTheBaseAlone) {
  const Problem problem = MakeProblem(kSites[0], GetParam(), true);
  Problem base_only = problem;
  base_only.routing.clear();
  const Result with = Evaluate(problem), without = Evaluate(base_only);
  for (const auto& [begin, end] : {std::pair{0, 2}, std::pair{16, 19}}) {
    EXPECT_TRUE(at::equal(with.y_TO.slice(0, begin, end),
                          without.y_TO.slice(0, begin, end)));
    EXPECT_TRUE(at::equal(with.dx_TI.slice(0, begin, end),
                          without.dx_TI.slice(0, begin, end)));
  }
}

TEST_P(LoraLinearTest, KeepsNanOfOneAdapterInItsRows) {
  const Problem clean = MakeProblem(kSites[0], GetParam(), false);
  const Result before = Evaluate(clean);
  Problem dirty = clean;
  auto bad = std::make_shared<AdapterVersion>(*clean.routing[1].version);
  bad->compute_N = at::full_like(bad->compute_N, NAN);
  dirty.routing[1].version = bad;
  const Result after = Evaluate(dirty);
  EXPECT_TRUE(
      after.y_TO.slice(0, 11, 16).narrow(1, 0, 32).isnan().all().item<bool>());
  for (const auto& [begin, end] : {std::pair{0, 11}, std::pair{16, 23}}) {
    EXPECT_TRUE(at::equal(before.y_TO.slice(0, begin, end),
                          after.y_TO.slice(0, begin, end)));
    EXPECT_TRUE(at::equal(before.dx_TI.slice(0, begin, end),
                          after.dx_TI.slice(0, begin, end)));
  }
  for (const size_t i : {0, 2, 3}) {
    EXPECT_TRUE(at::equal(before.gradients[i], after.gradients[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, LoraLinearTest,
                         ::testing::Values(at::kDouble, at::kFloat,
                                           at::kBFloat16),
                         weft::testing::DtypeName);

TEST(LoraLinearGradientTest, LeavesModulesOfOtherSitesAlone) {
  const Problem problem = MakeProblem({1, ProjectionGroup::kQkv}, at::kFloat,
                                      /*with_bias=*/false);
  const LoraSegment& segment = problem.routing[0];
  const at::Tensor change =
      Evaluate(problem).gradients[0] - problem.Gradient(0);
  const AdapterLayout& layout = *segment.version->layout;
  const std::vector<LoraFactor>& mine =
      layout.group(1, ProjectionGroup::kQkv).factors;
  const int64_t begin = mine.front().a_offset;
  const int64_t end = mine.back().b_offset + mine.back().rank * mine.back().out;
  EXPECT_EQ(MaxAbs(change.slice(0, 0, begin)), 0);
  EXPECT_EQ(MaxAbs(change.slice(0, end)), 0);
  EXPECT_GT(MaxAbs(change.slice(0, begin, end)), 0);
}

TEST(LoraLinearGradientTest, OfTheInputIsLeftOutOnDemand) {
  const Problem problem = MakeProblem(kSites[3], at::kFloat, false);
  const Result with = Evaluate(problem);
  const Result without = Evaluate(problem, /*want_input_gradient=*/false);
  EXPECT_FALSE(without.dx_TI.defined());
  for (size_t i = 0; i < with.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(with.gradients[i], without.gradients[i]));
  }
}

TEST(LoraLinearGradientTest, OfTheInputDoesNotNeedThatOfTheAdapter) {
  const Problem problem = MakeProblem(kSites[0], at::kFloat, false);
  Problem frozen = problem;
  frozen.gradients.clear();
  EXPECT_TRUE(at::equal(Evaluate(problem).dx_TI, Evaluate(frozen).dx_TI));
}

TEST(LoraLinearGradientTest, OfTwoSegmentsOfOneAdapterAddUp) {
  Problem problem = MakeProblem(kSites[0], at::kDouble, false);
  const LoraSegment first = problem.routing[0];
  const at::Tensor gradient_N = problem.Gradient(0);
  problem.routing = {first, {.begin = 14, .end = 20, .version = first.version}};
  const Result expected = Oracle(problem);
  // Each gradient includes the old values. The sum must include them once.
  const at::Tensor both =
      expected.gradients[0] + expected.gradients[1] - gradient_N;
  ShrunkInputs shrunk;
  const LoraPass pass = {.routing = problem.routing, .shape = kShape};
  (void)LoraLinear(problem.x_TI, problem.base, pass, problem.site, &shrunk);
  (void)LoraLinearBackward(problem.dy_TO, problem.x_TI, problem.base, pass,
                           problem.site, shrunk, problem.gradients,
                           /*want_input_gradient=*/false);
  ExpectNear(gradient_N, both, kEpsilonF64, kRows, "gradient");
}

TEST(LoraLinearShapeTest, NoRowsAreValid) {
  for (const bool with_bias : {false, true}) {
    const Problem problem = MakeProblem(kSites[0], at::kFloat, with_bias, 0);
    const Result result = Evaluate(problem);
    EXPECT_EQ(result.y_TO.size(0), 0);
    EXPECT_EQ(result.dx_TI.size(0), 0);
  }
}

TEST(LoraLinearShapeTest, GivesTheSameWhenNoTapeIsWanted) {
  const Problem problem = MakeProblem(kSites[0], at::kFloat, true);
  EXPECT_TRUE(at::equal(LoraLinear(problem.x_TI, problem.base,
                                   {problem.routing, kShape}, problem.site,
                                   /*shrunk=*/nullptr),
                        Evaluate(problem).y_TO));
}

TEST(LoraLinearShapeTest, AFreshAdapterChangesNothing) {
  Problem problem = MakeProblem(kSites[0], at::kFloat, false);
  const Adapter fresh({.rank = 4}, kShape, at::kFloat, at::kCPU);
  problem.routing = {{.begin = 0, .end = kRows, .version = fresh.latest()}};
  Problem base_only = problem;
  base_only.routing.clear();
  EXPECT_TRUE(at::equal(Evaluate(problem).y_TO, Evaluate(base_only).y_TO));
}

}  // namespace
}  // namespace weft::lora::lora_linear_test
