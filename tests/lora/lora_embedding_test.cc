#include "src/lora/lora_embedding.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "tests/support/dtype_name.h"
#include "tests/support/tensors_near.h"

namespace weft::lora::lora_embedding_test {
namespace {

constexpr model_config::ModelShape kShape = {.num_layers = 1,
                                             .hidden = 24,
                                             .q_width = 32,
                                             .kv_width = 16,
                                             .ffn = 40,
                                             .vocab = 9};
constexpr int64_t kRows = 23;
constexpr double kScale = 4.875;  // Exact in every dtype.
constexpr int64_t kPadding = 3;   // Both adapters have this token.

AdapterVersionPtr MakeVersion(int rank, at::ScalarType dtype,
                              std::vector<TargetModule> modules) {
  auto version = std::make_shared<AdapterVersion>();
  version->layout = std::make_shared<AdapterLayout>(
      kShape,
      LoraConfig{
          .rank = rank, .alpha = 6, .target_modules = std::move(modules)});
  const int64_t size = version->layout->num_parameters();
  version->compute_N = (at::randn({size}, at::kDouble) * 0.3).to(dtype);
  version->weights_N = version->compute_N.to(at::kFloat);
  return version;
}

struct Problem {
  at::Tensor tokens_T;
  at::Tensor base_TH;
  LoraRouting routing;
  LoraGradients gradients;  // The gradients before the pass. Tests add to
                            // copies.
  at::Tensor dx_TH;
};

// The rows are 2 of the base, 9 of adapter 1, 5 of adapter 2, 3 of the base,
// and 4 of an adapter without the embedding. There are only 9 different tokens,
// so most occur more than once.
Problem MakeProblem(at::ScalarType dtype) {
  at::manual_seed(12);
  const auto random = [&] {
    return at::randn({kRows, kShape.hidden}, at::kDouble).to(dtype);
  };
  Problem problem{.tokens_T = at::randint(kShape.vocab, {kRows}, at::kLong),
                  .base_TH = random(),
                  .dx_TH = random()};
  const TargetModule embedding = TargetModule::kEmbedTokens;
  const AdapterVersionPtr versions[] = {
      MakeVersion(4, dtype, {embedding}),
      MakeVersion(7, dtype, {TargetModule::kQProj, embedding}),
      MakeVersion(3, dtype, {TargetModule::kQProj})};
  const int64_t ranges[][2] = {{2, 11}, {11, 16}, {19, 23}};
  for (int i = 0; i < 3; ++i) {
    const int64_t size = versions[i]->layout->num_parameters();
    problem.routing.push_back(
        {.begin = ranges[i][0], .end = ranges[i][1], .version = versions[i]});
    problem.gradients.push_back(
        {.version = versions[i],
         .gradient_N = at::randn(
             {size}, dtype == at::kDouble ? at::kDouble : at::kFloat)});
  }
  return problem;
}

struct Result {
  at::Tensor x_TH;
  std::vector<at::Tensor> gradients;  // They include problem.gradients.
};

// Computes the formula in f64, with a one-hot product for the embedding, and
// differentiates it by autograd, but the padding token's column of A.
Result Oracle(const Problem& problem) {
  Result result;
  at::Tensor x = problem.base_TH.to(at::kDouble);
  std::vector<at::Tensor> flats;
  const at::Tensor one_hot =
      at::one_hot(problem.tokens_T, kShape.vocab).to(at::kDouble);
  for (const LoraSegment& segment : problem.routing) {
    const AdapterVersion& version = *segment.version;
    at::Tensor flat =
        version.compute_N.to(at::kDouble).clone().requires_grad_(true);
    flats.push_back(flat);
    for (const LoraFactor& factor :
         version.layout->group(0, ProjectionGroup::kEmbedTokens).factors) {
      const at::Tensor whole_RV = version.A(flat, factor);
      const at::Tensor a_RV = at::where(at::arange(kShape.vocab).eq(kPadding),
                                        whole_RV.detach(), whole_RV);
      const at::Tensor delta = one_hot.slice(0, segment.begin, segment.end)
                                   .matmul(a_RV.t())
                                   .matmul(version.B(flat, factor).t()) *
                               (factor.scale * kScale);
      x = x + at::constant_pad_nd(delta,
                                  {0, 0, segment.begin, kRows - segment.end});
    }
  }
  const auto gradients = torch::autograd::grad(
      {x}, flats, {problem.dx_TH.to(at::kDouble)}, /*retain_graph=*/{},
      /*create_graph=*/false, /*allow_unused=*/true);
  for (size_t i = 0; i < flats.size(); ++i) {
    at::Tensor sum = problem.gradients[i].gradient_N.to(at::kDouble).clone();
    if (gradients[i].defined()) sum += gradients[i];
    result.gradients.push_back(sum);
  }
  result.x_TH = x.detach();
  return result;
}

// Runs both passes, and adds to copies of the gradients.
Result Evaluate(const Problem& problem) {
  LoraGradients gradients = problem.gradients;
  for (LoraGradient& gradient : gradients) {
    gradient.gradient_N = gradient.gradient_N.clone();
  }
  Result result{.x_TH = problem.base_TH.clone()};
  AddLoraEmbedding(problem.tokens_T, problem.routing, kScale, result.x_TH);
  LoraEmbeddingBackward(problem.dx_TH, problem.tokens_T, problem.routing,
                        gradients, kScale, kPadding);
  for (const LoraGradient& gradient : gradients) {
    result.gradients.push_back(gradient.gradient_N);
  }
  return result;
}

class LoraEmbeddingTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(LoraEmbeddingTest, MatchesAutogradOfTheFormulaInF64) {
  const Problem problem = MakeProblem(GetParam());
  const Result expected = Oracle(problem), actual = Evaluate(problem);
  const double epsilon = EpsilonOf(GetParam());
  EXPECT_EQ(actual.x_TH.scalar_type(), GetParam());
  ExpectNear(actual.x_TH, expected.x_TH, epsilon, kShape.hidden);
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    ExpectNear(actual.gradients[i], expected.gradients[i], epsilon,
               std::max(kShape.hidden, kRows));
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, LoraEmbeddingTest,
                         ::testing::Values(at::kDouble, at::kFloat,
                                           at::kBFloat16),
                         weft::testing::DtypeName);

TEST(LoraEmbeddingRoutingTest, LeavesRowsOfOthersAlone) {
  const Problem problem = MakeProblem(at::kFloat);
  const Result result = Evaluate(problem);
  for (const auto& [begin, end] : {std::pair{0, 2}, std::pair{16, 23}}) {
    EXPECT_TRUE(at::equal(result.x_TH.slice(0, begin, end),
                          problem.base_TH.slice(0, begin, end)));
  }
  EXPECT_TRUE(at::equal(result.gradients[2], problem.gradients[2].gradient_N));
}

TEST(LoraEmbeddingRoutingTest, ChangesColumnsOfItsTokensAlone) {
  const Problem problem = MakeProblem(at::kFloat);
  const LoraSegment& segment = problem.routing[1];
  const LoraFactor& factor =
      segment.version->layout->group(0, ProjectionGroup::kEmbedTokens)
          .factors[0];
  const at::Tensor change = segment.version->A(
      Evaluate(problem).gradients[1] - problem.gradients[1].gradient_N, factor);
  const at::Tensor tokens =
      problem.tokens_T.slice(0, segment.begin, segment.end);
  for (int64_t token = 0; token < kShape.vocab; ++token) {
    EXPECT_EQ(change.select(1, token).any().item<bool>(),
              token != kPadding && tokens.eq(token).any().item<bool>())
        << token;
  }
}

TEST(LoraEmbeddingRoutingTest, TrainsOnlyWhereAGradientIsWanted) {
  Problem problem = MakeProblem(at::kFloat);
  const at::Tensor all = Evaluate(problem).gradients[1];
  EXPECT_TRUE(TrainsEmbedding(problem.gradients));
  problem.gradients.erase(problem.gradients.begin());
  EXPECT_TRUE(TrainsEmbedding(problem.gradients));
  EXPECT_TRUE(at::equal(Evaluate(problem).gradients[0], all));
  EXPECT_FALSE(at::equal(all, problem.gradients[0].gradient_N));
  problem.gradients.erase(problem.gradients.begin());
  EXPECT_FALSE(TrainsEmbedding(problem.gradients));
}

// Each of the nine tokens occurs hundreds of times. The test computes the
// gradient on one thread and on two.
TEST(LoraEmbeddingRoutingTest, SumsInTheSameOrderEachTime) {
  constexpr int64_t kMany = 4000;
  at::manual_seed(13);
  const AdapterVersionPtr version =
      MakeVersion(16, at::kFloat, {TargetModule::kEmbedTokens});
  const at::Tensor tokens = at::randint(kShape.vocab, {kMany}, at::kLong);
  const at::Tensor dx = at::randn({kMany, kShape.hidden});
  const int threads = at::get_num_threads();
  std::vector<at::Tensor> gradients;
  for (const int count : {1, 2, 2, 2}) {
    at::set_num_threads(count);
    gradients.push_back(at::zeros_like(version->compute_N));
    LoraEmbeddingBackward(
        dx, tokens, {{.begin = 0, .end = kMany, .version = version}},
        {{.version = version, .gradient_N = gradients.back()}}, kScale,
        /*padding=*/-1);
  }
  at::set_num_threads(threads);
  const LoraFactor& factor = version->layout->factors()[0];
  for (const at::Tensor& gradient : gradients) {
    EXPECT_TRUE(at::equal(version->A(gradient, factor),
                          version->A(gradients.front(), factor)));
  }
}

}  // namespace
}  // namespace weft::lora::lora_embedding_test
