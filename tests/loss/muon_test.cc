#include "src/loss/muon.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "src/loss/adamw.h"
#include "tests/support/limited_memory.h"
#include "tests/support/tolerance.h"

namespace weft::loss {
namespace {

constexpr int kMuonSteps = 10;

// A matrix of the layout.
struct Place {
  int64_t offset = 0;
  int64_t rows = 0;
  int64_t columns = 0;

  at::Tensor Of(const at::Tensor& flat) const {
    return flat.narrow(0, offset, rows * columns).view({rows, columns});
  }
};

std::vector<Place> PlacesOf(const lora::AdapterLayout& layout) {
  std::vector<Place> places;
  for (const lora::LoraFactor& factor : layout.factors()) {
    places.push_back({factor.a_offset, factor.rank, factor.in});
    places.push_back({factor.b_offset, factor.out, factor.rank});
  }
  return places;
}

// The published step of one matrix, written literally, in f64.
struct LiteralMuon {
  at::Tensor w, m;

  void Step(const MuonConfig& c, const at::Tensor& clipped) {
    m = c.momentum * m + (1 - c.momentum) * clipped;
    const at::Tensor u =
        c.nesterov ? (1 - c.momentum) * clipped + c.momentum * m : m;
    at::Tensor x = u / std::max(u.norm().item<double>(), 1e-7);
    for (int i = 0; i < c.ns_steps; ++i) {
      const at::Tensor y = at::mm(x, x.t());
      x = 3.4445 * x - 4.7750 * at::mm(y, x) + 2.0315 * at::mm(y, at::mm(y, x));
    }
    const double longest = static_cast<double>(std::max(w.size(0), w.size(1)));
    w = w - c.learning_rate * c.weight_decay * w -
        c.learning_rate * 0.2 * std::sqrt(longest) * x;
  }
};

// Makes a whole step.
template <typename... Rest>
void MuonStep(const MuonConfig& config, double norm, Rest&&... rest) {
  size_t part = 0;
  while (!MuonPart(part, config, norm, rest...)) ++part;
}

// Returns how far an element may be from the literal formula after kMuonSteps,
// for weights of at most 5. Rounding changes u by a relative 4 epsilon at most.
// A step of the iteration changes a singular value by a factor of at most
// 3.4445, which is also the largest slope of its polynomial, so x changes by at
// most 3.4445^ns_steps times as much.
double ToleranceOf(const MuonConfig& config, double epsilon, int64_t longest) {
  const double change = 4 * epsilon * std::pow(3.4445, config.ns_steps);
  return kMuonSteps * (config.learning_rate * 0.2 *
                           std::sqrt(static_cast<double>(longest)) * change +
                       4 * epsilon * 5);
}

struct MuonCase {
  std::string name;
  MuonConfig config;
  at::ScalarType dtype;
  int rank;  // The widths are 24, 16 and 40.
};

class MuonTest : public ::testing::TestWithParam<MuonCase> {};

TEST_P(MuonTest, FollowsTheLiteralFormulaOverTenSteps) {
  const auto& [name, config, dtype, rank] = GetParam();
  const model_config::ModelShape shape = {.num_layers = 2,
                                          .hidden = 24,
                                          .q_width = 24,
                                          .kv_width = 16,
                                          .ffn = 40,
                                          .vocab = 50};
  const lora::AdapterLayout layout(shape, {.rank = rank});
  at::manual_seed(7);
  at::Tensor weights = at::randn({layout.num_parameters()}, dtype);
  at::Tensor in_place = weights.clone();
  at::Tensor m = at::zeros_like(weights), m2 = m.clone();
  at::Tensor work = at::empty_like(weights);
  std::vector<LiteralMuon> literal;
  const std::vector<Place> places = PlacesOf(layout);
  for (const Place& place : places) {
    const at::Tensor w = place.Of(weights).to(at::kDouble, false, true);
    literal.push_back({w, at::zeros_like(w)});
  }
  for (int step = 0; step < kMuonSteps; ++step) {
    at::Tensor gradient = at::randn_like(weights);
    places[0].Of(gradient).zero_();  // As of A while B is zero.
    const double norm = GradientNorm(gradient);
    const at::Tensor before = weights.clone();
    at::Tensor next = at::empty_like(weights);
    MuonStep(config, norm, layout, weights, gradient, m, work, next);
    EXPECT_TRUE(at::equal(weights, before)) << "the old version changed";
    weights = next;
    MuonStep(config, norm, layout, in_place, gradient, m2, work, in_place);
    const double scale = GradientScale(config.max_grad_norm, norm);
    for (size_t i = 0; i < places.size(); ++i) {
      literal[i].Step(config, places[i].Of(gradient).to(at::kDouble) * scale);
    }
  }
  EXPECT_TRUE(at::equal(weights, in_place));
  const double epsilon = dtype == at::kDouble ? kEpsilonF64 : kEpsilonF32;
  for (size_t i = 0; i < places.size(); ++i) {
    EXPECT_TRUE(at::allclose(places[i].Of(weights).to(at::kDouble),
                             literal[i].w, 0, ToleranceOf(config, epsilon, 40)))
        << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Configs, MuonTest,
    ::testing::Values(
        MuonCase{"DefaultsInFloat", {}, at::kFloat, 4},
        MuonCase{"DefaultsInDouble", {}, at::kDouble, 4},
        MuonCase{
            "RanksAboveSomeWidths", {.learning_rate = 0.1}, at::kDouble, 20},
        MuonCase{"RanksAboveAllWidths", {.learning_rate = 0.1}, at::kFloat, 64},
        MuonCase{"AllInFloat",
                 {.learning_rate = 0.1,
                  .momentum = 0.5,
                  .nesterov = false,
                  .weight_decay = 0.1,
                  .ns_steps = 3,
                  .max_grad_norm = 0.5},
                 at::kFloat,
                 3},
        MuonCase{"OneStepWithoutMomentum",
                 {.learning_rate = 0.1, .momentum = 0, .ns_steps = 1},
                 at::kDouble,
                 1},
        MuonCase{"MostSteps",
                 {.learning_rate = 0.1, .ns_steps = 10},
                 at::kDouble,
                 4}),
    [](const auto& test) { return test.param.name; });

// Singular values of very different sizes all come near 1, and those of a
// direction that the gradient does not have stay 0.
TEST(MuonStepTest, MakesSingularValuesAlike) {
  const lora::AdapterLayout layout(
      {.num_layers = 1, .hidden = 32, .q_width = 32, .kv_width = 8},
      {.rank = 4, .target_modules = {TargetModule::kQProj}});
  at::manual_seed(9);
  const Place a = PlacesOf(layout)[0];
  at::Tensor gradient = at::zeros({layout.num_parameters()});
  const at::Tensor rows = std::get<0>(at::linalg_qr(at::randn({32, 4}))).t();
  a.Of(gradient).copy_(at::tensor({1e3F, 1.0F, 30.0F, 0.0F}).view({4, 1}) *
                       rows);
  at::Tensor weights = at::zeros_like(gradient), m = at::zeros_like(gradient);
  at::Tensor work = at::empty_like(gradient);
  MuonStep({.learning_rate = 1, .ns_steps = 10}, GradientNorm(gradient), layout,
           weights, gradient, m, work, weights);
  const at::Tensor size = a.Of(weights).norm(2, 1) / (0.2 * std::sqrt(32.0));
  for (const int row : {0, 1, 2}) {
    EXPECT_NEAR(size[row].item<float>(), 1, 0.35) << row;
  }
  EXPECT_EQ(size[3].item<float>(), 0);
  EXPECT_EQ(PlacesOf(layout)[1].Of(weights).abs().max().item<float>(), 0);
}

// More matrices of one shape than one part takes.
TEST(MuonStepTest, DividesManyMatricesIntoParts) {
  const lora::AdapterLayout layout(
      {.num_layers = 80, .hidden = 2048, .q_width = 2048, .kv_width = 64},
      {.rank = 64, .target_modules = {TargetModule::kQProj}});
  const MuonConfig config = {.learning_rate = 1e-2};
  at::manual_seed(10);
  const at::Tensor gradient = at::randn({layout.num_parameters()});
  at::Tensor weights = at::zeros_like(gradient), m = at::zeros_like(gradient);
  at::Tensor work = at::empty_like(gradient);
  size_t part = 0;
  while (
      !MuonPart(part, config, 1, layout, weights, gradient, m, work, weights)) {
    ++part;
    EXPECT_EQ(m.any().item<bool>() || weights.any().item<bool>(), false);
  }
  EXPECT_EQ(part, 1u);
  const std::vector<Place> places = PlacesOf(layout);
  for (const size_t i : {size_t{0}, size_t{1}, size_t{62}, places.size() - 2}) {
    const at::Tensor g = places[i].Of(gradient).to(at::kDouble);
    LiteralMuon literal{at::zeros_like(g), at::zeros_like(g)};
    literal.Step(config, g);
    EXPECT_TRUE(at::allclose(places[i].Of(weights).to(at::kDouble), literal.w,
                             0, ToleranceOf(config, kEpsilonF32, 2048)))
        << i;
  }
}

TEST(MuonStepTest, AnAllocationThatFailsChangesNothing) {
  const lora::AdapterLayout layout(
      {.num_layers = 1, .hidden = 8, .q_width = 8, .kv_width = 4, .ffn = 12},
      {.rank = 2});
  at::manual_seed(11);
  const at::Tensor weights = at::randn({layout.num_parameters()});
  const at::Tensor gradient = at::randn_like(weights);
  const at::Tensor momentum = at::randn_like(weights);
  at::Tensor w = weights.clone(), m = momentum.clone();
  at::Tensor work = at::empty_like(w);
  testing::LimitedMemory memory;
  int failures = 0;
  for (bool failed = true; failed; failures += failed ? 1 : 0) {
    int left = failures;
    memory.SetHook([&left] {
      TORCH_CHECK_WITH(OutOfMemoryError, left-- > 0, "no bytes left");
    });
    try {
      MuonStep({}, 1, layout, w, gradient, m, work, w);
      failed = false;
    } catch (const c10::OutOfMemoryError&) {
      ASSERT_TRUE(at::equal(w, weights) && at::equal(m, momentum)) << failures;
    }
    memory.SetHook(nullptr);
  }
  EXPECT_GT(failures, 20);
  EXPECT_FALSE(at::equal(w, weights) || at::equal(m, momentum));
}

// The bound that the header states.
TEST(MuonStepTest, TakesLittleMemory) {
  const lora::AdapterLayout layout(
      {.num_layers = 12, .hidden = 2048, .q_width = 2048, .kv_width = 64},
      {.rank = 64, .target_modules = {TargetModule::kQProj}});
  const at::Tensor gradient = at::ones({layout.num_parameters()});
  at::Tensor w = at::zeros_like(gradient), m = at::zeros_like(gradient);
  at::Tensor work = at::empty_like(gradient);
  testing::LimitedMemory memory;
  MuonStep({}, 1, layout, w, gradient, m, work, w);
  const int64_t matrices = 12 * 64 * 2048;  // Of a product: all A, or all B.
  EXPECT_LE(memory.TakePeak(), 3 * 4 * matrices + 4 * 8 * 12 * 64 * 64);
}

TEST(MuonStepTest, RefusesWhatDoesNotFitAndChangesNothing) {
  const lora::AdapterLayout layout(
      {.num_layers = 1, .hidden = 4, .q_width = 4, .kv_width = 4},
      {.rank = 1, .target_modules = {TargetModule::kQProj}});
  at::Tensor good = at::ones({8}), m = at::ones({8}), work = at::ones({8});
  const auto error = [&](const at::Tensor& gradient, int steps,
                         at::Tensor momentum) -> std::string {
    try {
      MuonStep({.ns_steps = steps}, 1, layout, good, gradient, momentum, work,
               good);
    } catch (const c10::Error& refused) {
      return refused.what_without_backtrace();
    }
    return "";
  };
  EXPECT_EQ(error(at::ones({7}), 5, m).substr(0, 24),
            "gradient_N is Float [7] ");
  EXPECT_EQ(error(good, 5, m.to(at::kDouble)).substr(0, 20),
            "momentum_N is Double");
  EXPECT_EQ(error(good, 0, m).substr(0, 31), "Muon makes at least 1 step, got");
  EXPECT_TRUE(at::equal(good, at::ones({8})));
  EXPECT_TRUE(at::equal(m, at::ones({8})));
}

TEST(CudaMuonStepTest, IsThatOfTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const lora::AdapterLayout layout(
      {.num_layers = 2, .hidden = 64, .q_width = 64, .kv_width = 32, .ffn = 96},
      {.rank = 8});
  const MuonConfig config = {.learning_rate = 0.1, .max_grad_norm = 0.5};
  at::manual_seed(8);
  const at::Tensor weights = at::randn({layout.num_parameters()});
  const at::Tensor gradient = at::randn_like(weights);
  const auto run = [&](at::TensorOptions options) {
    const at::Tensor w = weights.to(options), g = gradient.to(options);
    at::Tensor m = at::zeros_like(w), work = at::empty_like(w);
    at::Tensor out = at::empty_like(w);
    MuonStep(config, GradientNorm(g), layout, w, g, m, work, out);
    return at::stack({out, m}).cpu().to(at::kDouble);
  };
  EXPECT_TRUE(at::allclose(run(at::TensorOptions(at::kCUDA).dtype(at::kFloat)),
                           run(at::TensorOptions(at::kDouble)), 0,
                           ToleranceOf(config, kEpsilonF32, 96)));
}

}  // namespace
}  // namespace weft::loss
