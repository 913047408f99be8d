#include "src/loss/fused_head.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/tolerance.h"

namespace weft::loss {
namespace {

using ::weft::testing::kEpsilonBf16;
using ::weft::testing::kEpsilonF32;
using ::weft::testing::kEpsilonF64;
using ::weft::testing::Tolerance;

// Which rows train lm_head, and with whom.
enum class Adapters { kNone, kOne, kDistinct, kSkewed };

constexpr int64_t kHidden = 24;
constexpr int64_t kVocab = 211;
constexpr double kLargestLogit = 40;

// Row r has r % 3 + 1 targets and its own temperature.
ScoreRows MakeRows(int64_t num_rows) {
  ScoreRows rows;
  rows.row_offsets = {0};
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i <= r % 3; ++i) {
      rows.targets.push_back((r * 29 + i * 53) % kVocab);
    }
    rows.row_offsets.push_back(static_cast<int64_t>(rows.targets.size()));
    rows.temperatures.push_back(0.6F + 0.2F * static_cast<float>(r % 6));
  }
  return rows;
}

// An adapter of lm_head alone, of random weights.
lora::AdapterVersionPtr HeadVersion(int rank, at::ScalarType dtype) {
  auto version = std::make_shared<lora::AdapterVersion>();
  version->layout = std::make_shared<lora::AdapterLayout>(
      lora::ModelShape{.hidden = kHidden, .vocab = kVocab},
      LoraConfig{
          .rank = rank, .alpha = 6, .target_modules = {TargetModule::kLmHead}});
  version->compute_N =
      (at::randn({version->layout->num_parameters()}, at::kDouble) * 0.3)
          .to(dtype);
  return version;
}

void AddSegment(lora::LoraRouting& routing, int64_t begin, int64_t end,
                int rank, at::ScalarType dtype) {
  if (begin >= end) return;
  const lora::AdapterVersionPtr version = HeadVersion(rank, dtype);
  // bf16 adapters have f32 gradients, as all do in service.
  const auto gradient_type = dtype == at::kDouble ? at::kDouble : at::kFloat;
  routing.push_back({.begin = begin,
                     .end = end,
                     .version = version,
                     .gradient_N = at::zeros(
                         {version->layout->num_parameters()}, gradient_type)});
}

// Skewed: a first row of its own, then most rows with one adapter, an adapter
// of layers alone, and rows of the base model at the end.
lora::LoraRouting MakeRouting(Adapters adapters, int64_t num_rows,
                              at::ScalarType dtype) {
  lora::LoraRouting routing;
  if (adapters == Adapters::kOne) AddSegment(routing, 0, num_rows, 3, dtype);
  if (adapters == Adapters::kDistinct) {
    for (int64_t r = 0; r < num_rows; ++r) {
      AddSegment(routing, r, r + 1, static_cast<int>(r % 4) + 1, dtype);
    }
  }
  if (adapters == Adapters::kSkewed) {
    AddSegment(routing, 0, std::min<int64_t>(num_rows, 1), 2, dtype);
    AddSegment(routing, 1, num_rows - num_rows / 4, 5, dtype);
    if (num_rows >= 8) {
      auto version = std::make_shared<lora::AdapterVersion>();
      version->layout = std::make_shared<lora::AdapterLayout>(
          lora::ModelShape{.hidden = kHidden, .vocab = kVocab}, LoraConfig());
      const int64_t begin = num_rows - num_rows / 4;
      routing.push_back({.begin = begin, .end = begin + 1, .version = version});
    }
  }
  return routing;
}

struct Problem {
  at::Tensor hidden;
  at::Tensor weight;
  ScoreRows rows;
  at::Tensor g;
};

HeadResult Score(const Problem& problem, const HeadOptions& options = {},
                 bool want_gradient = true, bool want_entropy = false) {
  return ScoreHead(problem.hidden, problem.weight, problem.rows, options,
                   want_gradient, want_entropy);
}

// The backward pass consumes what it is given.
HeadResult Copy(HeadResult result) {
  if (result.projection_RH.defined()) {
    result.projection_RH = result.projection_RH.clone();
  }
  for (at::Tensor& projected : result.projected_nR) {
    if (projected.defined()) projected = projected.clone();
  }
  return result;
}

at::Tensor Backward(const HeadResult& result, const Problem& problem,
                    const HeadOptions& options = {}) {
  return HeadBackward(Copy(result), problem.hidden, problem.weight,
                      problem.rows, options, problem.g);
}

// The upstream gradient is signed and sums to zero.
Problem MakeProblem(int64_t num_rows, at::ScalarType dtype,
                    Adapters adapters = Adapters::kNone) {
  at::manual_seed(5);
  Problem problem{at::randn({num_rows, kHidden}, at::kDouble).to(dtype),
                  at::randn({kVocab, kHidden}, at::kDouble).to(dtype),
                  MakeRows(num_rows),
                  {}};
  at::Tensor g = at::randn({static_cast<int64_t>(problem.rows.targets.size())},
                           at::kDouble);
  if (g.numel() > 1) g -= g.mean();
  problem.g = g.to(at::kFloat);
  problem.rows.routing = MakeRouting(adapters, num_rows, dtype);
  return problem;
}

struct Oracle {
  at::Tensor logprobs;
  at::Tensor entropies;
  at::Tensor dhidden;
  std::vector<at::Tensor> dadapters;  // Flat, one per segment.
};

// Adds every segment's LoRA to the dense logits; returns the leaves.
std::vector<at::Tensor> AddDenseLora(const Problem& problem,
                                     const at::Tensor& hidden, at::Tensor& z) {
  std::vector<at::Tensor> leaves;
  std::vector<at::Tensor> deltas;
  int64_t done = 0;
  for (const lora::LoraSegment& segment : problem.rows.routing) {
    const lora::AdapterVersion& version = *segment.version;
    const auto& factors =
        version.layout->group(0, lora::ProjectionGroup::kLmHead).factors;
    leaves.emplace_back();
    if (factors.empty()) continue;
    leaves.back() = version.compute_N.to(at::kDouble).clone();
    leaves.back().requires_grad_(true);
    const int64_t count = segment.end - segment.begin;
    deltas.push_back(at::zeros({segment.begin - done, kVocab}, at::kDouble));
    deltas.push_back(hidden.narrow(0, segment.begin, count)
                         .matmul(version.A(leaves.back(), factors[0]).t())
                         .matmul(version.B(leaves.back(), factors[0]).t()) *
                     factors[0].scale);
    done = segment.end;
  }
  deltas.push_back(at::zeros({z.size(0) - done, kVocab}, at::kDouble));
  z = z + at::cat(deltas);
  return leaves;
}

// Dense logits and log_softmax under f64 autograd.
Oracle DenseOracle(const Problem& problem, double softcap) {
  const ScoreRows& rows = problem.rows;
  at::Tensor hidden =
      problem.hidden.to(at::kDouble).detach().clone().requires_grad_(true);
  at::Tensor z = hidden.matmul(problem.weight.to(at::kDouble).t());
  const std::vector<at::Tensor> leaves = AddDenseLora(problem, hidden, z);
  if (softcap > 0) z = softcap * (z / softcap).tanh();
  const at::Tensor log_p =
      (z / at::tensor(rows.temperatures).to(at::kDouble).unsqueeze(1))
          .log_softmax(1);
  const at::Tensor row_of_entry =
      at::repeat_interleave(at::tensor(rows.row_offsets, at::kLong).diff());
  const at::Tensor logprobs =
      log_p.index({row_of_entry, at::tensor(rows.targets, at::kLong)});
  (logprobs * problem.g.to(at::kDouble)).sum().backward();
  Oracle oracle{logprobs.detach(),
                -(log_p.exp() * log_p).sum(1).detach(),
                hidden.grad(),
                {}};
  for (const at::Tensor& leaf : leaves) {
    oracle.dadapters.push_back(leaf.defined() ? leaf.grad() : at::Tensor());
  }
  return oracle;
}

void ExpectClose(const at::Tensor& actual, const at::Tensor& expected,
                 double tolerance) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  if (actual.numel() == 0) return;
  const at::Tensor error = (actual.to(at::kDouble) - expected).abs();
  EXPECT_LE(error.max().item<double>(), tolerance);
}

double Epsilon(at::ScalarType dtype) {
  return dtype == at::kDouble ? kEpsilonF64 : kEpsilonF32;
}

// An adapter's gradient is a sum over its rows, and every probability in it has
// the rounding of its logit.
void ExpectAdaptersClose(const Problem& problem, const Oracle& oracle,
                         double epsilon) {
  for (size_t s = 0; s < problem.rows.routing.size(); ++s) {
    const lora::LoraSegment& segment = problem.rows.routing[s];
    if (!oracle.dadapters[s].defined()) continue;
    const double size = oracle.dadapters[s].abs().max().item<double>();
    EXPECT_GT(size, 0);
    ExpectClose(segment.gradient_N, oracle.dadapters[s],
                Tolerance(epsilon, kHidden + segment.end - segment.begin,
                          std::max(size, kLargestLogit)));
  }
}

using Grid = std::tuple<std::pair<int64_t, int64_t>, at::ScalarType, double>;
class FusedHeadTest : public ::testing::TestWithParam<Grid> {};

TEST_P(FusedHeadTest, MatchesDenseAutograd) {
  const auto [shape, dtype, softcap] = GetParam();
  const HeadOptions options{.chunk_rows = shape.second, .softcap = softcap};
  const double tolerance = Tolerance(Epsilon(dtype), kHidden, kLargestLogit);
  for (const Adapters adapters : {Adapters::kNone, Adapters::kOne,
                                  Adapters::kDistinct, Adapters::kSkewed}) {
    SCOPED_TRACE(static_cast<int>(adapters));
    const Problem problem = MakeProblem(shape.first, dtype, adapters);
    const Oracle oracle = DenseOracle(problem, softcap);
    const HeadResult result = Score(problem, options, true, true);
    ExpectClose(result.logprobs_E, oracle.logprobs, tolerance);
    ExpectClose(result.entropies_R, oracle.entropies, tolerance);
    ExpectClose(Backward(result, problem, options), oracle.dhidden, tolerance);
    ExpectAdaptersClose(problem, oracle, Epsilon(dtype));
    EXPECT_EQ(result.target_slope_E.defined(), softcap > 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    RowsAndChunks, FusedHeadTest,
    ::testing::Combine(::testing::Values(std::pair<int64_t, int64_t>{2, 3},
                                         std::pair{8, 3}, std::pair{8, 8},
                                         std::pair{8, 16}, std::pair{1, 1},
                                         std::pair{4, 1}, std::pair{1000, 64},
                                         std::pair{2500, 1024}, std::pair{8, 0},
                                         std::pair{1000, -1}, std::pair{0, 4}),
                       ::testing::Values(at::kFloat, at::kDouble),
                       ::testing::Values(0.0, 5.0)));

TEST(FusedHeadEvalTest, WithoutGradientGivesTheSameLogprobsAndNothingElse) {
  const Problem problem = MakeProblem(10, at::kFloat);
  const HeadResult train = Score(problem, {.chunk_rows = 4}, true, false);
  const HeadResult eval = Score(problem, {.chunk_rows = 4}, false, false);
  EXPECT_TRUE(at::equal(train.logprobs_E, eval.logprobs_E));
  EXPECT_FALSE(eval.projection_RH.defined());
  EXPECT_FALSE(eval.entropies_R.defined());
  EXPECT_THROW((void)Backward(eval, problem), c10::Error);
}

TEST(FusedHeadBf16Test, LogprobsAreThoseOfF32Logits) {
  const Problem problem = MakeProblem(40, at::kBFloat16);
  const Oracle oracle = DenseOracle(problem, 0);
  const HeadResult result = Score(problem, {}, true, true);
  EXPECT_EQ(result.logprobs_E.scalar_type(), at::kFloat);
  ExpectClose(result.logprobs_E, oracle.logprobs,
              Tolerance(kEpsilonF32, kHidden, kLargestLogit));
  const at::Tensor dhidden = Backward(result, problem);
  EXPECT_EQ(dhidden.scalar_type(), at::kBFloat16);
  ExpectClose(dhidden, oracle.dhidden, Tolerance(kEpsilonBf16, 1, 10));
}

TEST(FusedHeadBf16Test, LoraGradientsAreThoseOfF32Logits) {
  const Problem problem = MakeProblem(40, at::kBFloat16, Adapters::kSkewed);
  const Oracle oracle = DenseOracle(problem, 0);
  const HeadResult result = Score(problem);
  ExpectClose(result.logprobs_E, oracle.logprobs,
              Tolerance(kEpsilonF32, kHidden, kLargestLogit));
  (void)Backward(result, problem);
  ExpectAdaptersClose(problem, oracle, kEpsilonF32);
}

TEST(FusedHeadBf16Test, WeightsWiderThanOneBlockAreWidenedInPieces) {
  at::manual_seed(6);
  const at::Tensor hidden = at::randn({3, 8}).to(at::kBFloat16);
  const at::Tensor weight = at::randn({20000, 8}).to(at::kBFloat16);
  const ScoreRows rows{{0, 1, 2, 3}, {0, 8192, 19999}, {1, 1, 1}};
  const HeadResult narrow = ScoreHead(hidden, weight, rows, {}, true, false);
  const HeadResult wide = ScoreHead(
      hidden.to(at::kFloat), weight.to(at::kFloat), rows, {}, true, false);
  ExpectClose(narrow.logprobs_E, wide.logprobs_E.to(at::kDouble),
              Tolerance(kEpsilonF32, 8, 20));
  ExpectClose(narrow.projection_RH, wide.projection_RH.to(at::kDouble),
              Tolerance(kEpsilonF32, 8, 20));
}

// Row r of the hidden states points at its target's weight: p is nearly 1, and
// what is left of the gradient is 1 - p.
TEST(FusedHeadAccuracyTest, SurePredictionsKeepTheirDigits) {
  Problem problem = MakeProblem(8, at::kFloat);
  problem.rows = {};
  problem.rows.row_offsets = {0};
  for (int64_t r = 0; r < 8; ++r) {
    const at::Tensor target = problem.weight[r];
    problem.hidden[r] = target * (12 / target.square().sum());
    problem.rows.targets.push_back(r);
    problem.rows.row_offsets.push_back(r + 1);
    problem.rows.temperatures.push_back(1.0F);
  }
  problem.g = at::ones({8}, at::kFloat);
  const Oracle oracle = DenseOracle(problem, 0);
  const HeadResult result = Score(problem, {}, true, false);
  const at::Tensor dhidden = Backward(result, problem);
  for (int64_t r = 0; r < 8; ++r) {
    // Relative to this row's own tiny gradient; p itself is rounded once.
    const double size = oracle.dhidden[r].abs().max().item<double>();
    const double weight = problem.weight[r].abs().max().item<double>();
    ExpectClose(
        dhidden[r], oracle.dhidden[r],
        Tolerance(kEpsilonF32, kHidden, 12) * size + kEpsilonF32 * weight);
  }
}

// As learnt prompt tokens that a group shares: one row, one target, many
// entries. What is left of the gradient is G (1 - p).
TEST(FusedHeadAccuracyTest, RepeatedTargetsKeepTheirDigits) {
  constexpr int64_t kRepeats = 16;
  Problem problem = MakeProblem(1, at::kFloat, Adapters::kOne);
  const at::Tensor target = problem.weight[7];
  problem.hidden[0] = target * (16 / target.square().sum());
  problem.rows.targets.assign(kRepeats, 7);
  problem.rows.row_offsets = {0, kRepeats};
  problem.g = at::ones({kRepeats}, at::kFloat);
  const Oracle oracle = DenseOracle(problem, 0);
  const HeadResult result = Score(problem);
  const at::Tensor dhidden = Backward(result, problem);
  const at::Tensor& dadapter = problem.rows.routing[0].gradient_N;
  // 1 - p has the relative rounding of the logits that make it.
  const double tolerance = Tolerance(kEpsilonF32, kHidden, kLargestLogit);
  for (const auto& [actual, expected] :
       {std::pair(dhidden, oracle.dhidden),
        std::pair(dadapter, oracle.dadapters[0])}) {
    const double size = expected.abs().max().item<double>();
    EXPECT_GT(size, 0);
    ExpectClose(actual, expected, tolerance * size);
  }
}

TEST(FusedHeadAccuracyTest, FewRowsSumALongVocabularyAsWellAsMany) {
  at::manual_seed(7);
  constexpr int64_t kLong = 40000;
  // A common offset: what BLAS adds up one by one is then off by 1e-5 and more.
  const at::Tensor weight = at::randn({kLong, 4}) * 0.1 + 1.0;
  const at::Tensor hidden = at::randn({1, 4}) * 0.1;
  const ScoreRows rows{{0, 1}, {7}, {1}};
  const HeadResult result = ScoreHead(hidden, weight, rows, {}, true, false);
  const at::Tensor wide = weight.to(at::kDouble);
  at::Tensor p = hidden.to(at::kDouble).matmul(wide.t()).softmax(1);
  p[0][7] = 0;
  ExpectClose(result.projection_RH, p.matmul(wide),
              Tolerance(kEpsilonF32, 1, 1));
}

// Row 0 keeps everything, row 1 drops what cannot matter in f32, row 2 all but
// its own target: what is left is c (1 - p) W_t.
TEST(FusedHeadFilterTest, LeavesOutWhatIsSmallInTheRowsThatAskForIt) {
  Problem problem = MakeProblem(3, at::kFloat);
  problem.rows.row_offsets = {0, 1, 2, 3};
  problem.rows.targets = {3, 5, 7};
  problem.rows.temperatures = {1, 1, 1};
  problem.g = at::ones({3}, at::kFloat);
  const HeadResult exact = Score(problem);
  const at::Tensor expected = Backward(exact, problem);
  problem.rows.filters = {0, 1e-30F, 0.9999F};
  const HeadResult filtered = Score(problem);
  const at::Tensor actual = Backward(filtered, problem);
  const double tolerance = Tolerance(kEpsilonF32, kHidden, kLargestLogit);
  for (const int64_t row : {0, 1}) {
    ExpectClose(actual[row], expected[row].to(at::kDouble), tolerance);
  }
  const double p = std::exp(exact.logprobs_E[2].item<double>());
  ExpectClose(actual[2], problem.weight[7].to(at::kDouble) * (1 - p),
              tolerance);
  EXPECT_GT((actual[2] - expected[2]).abs().max().item<double>(), 0.01);
  EXPECT_TRUE(at::equal(filtered.logprobs_E, exact.logprobs_E));
}

TEST(FusedHeadNanTest, OfOneAdapterStaysInItsRows) {
  Problem problem = MakeProblem(12, at::kFloat, Adapters::kSkewed);
  const HeadResult clean = Score(problem);
  const at::Tensor dclean = Backward(clean, problem);
  const at::Tensor gradient = problem.rows.routing[1].gradient_N.clone();
  problem = MakeProblem(12, at::kFloat, Adapters::kSkewed);
  auto diverged =
      std::make_shared<lora::AdapterVersion>(*problem.rows.routing[0].version);
  diverged->compute_N = at::full_like(diverged->compute_N, std::nan(""));
  problem.rows.routing[0].version = diverged;
  const at::Tensor dhidden = Backward(Score(problem), problem);
  EXPECT_TRUE(dhidden[0].isnan().all().item<bool>());
  EXPECT_TRUE(at::equal(dhidden.narrow(0, 1, 11), dclean.narrow(0, 1, 11)));
  EXPECT_TRUE(at::equal(problem.rows.routing[1].gradient_N, gradient));
}

TEST(FusedHeadNanTest, StaysInItsRow) {
  Problem problem = MakeProblem(6, at::kFloat);
  const HeadResult clean = Score(problem, {.chunk_rows = 3}, true, true);
  problem.hidden[4][0] = std::nan("");
  const HeadResult result = Score(problem, {.chunk_rows = 3}, true, true);
  const at::Tensor dclean = Backward(clean, problem);
  const at::Tensor dhidden = Backward(result, problem);
  EXPECT_TRUE(dhidden[4].isnan().all().item<bool>());
  for (int64_t row : {0, 1, 2, 3, 5}) {
    EXPECT_TRUE(at::equal(dhidden[row], dclean[row]));
    EXPECT_TRUE(at::equal(result.entropies_R[row], clean.entropies_R[row]));
  }
}

TEST(FusedHeadRefusalTest, InconsistentRowsThrow) {
  Problem problem = MakeProblem(4, at::kFloat);
  problem.rows.temperatures.pop_back();
  EXPECT_THROW((void)Score(problem, {}, false, false), c10::Error);
  problem = MakeProblem(4, at::kFloat);
  problem.rows.targets.pop_back();
  EXPECT_THROW((void)Score(problem, {}, false, false), c10::Error);
}

TEST(FusedHeadRefusalTest, GradientOfAnotherLengthThrows) {
  const Problem problem = MakeProblem(4, at::kFloat);
  const HeadResult result = Score(problem, {}, true, false);
  EXPECT_THROW((void)HeadBackward(result, problem.hidden, problem.weight,
                                  problem.rows, {}, at::ones({1})),
               c10::Error);
}

}  // namespace
}  // namespace weft::loss
