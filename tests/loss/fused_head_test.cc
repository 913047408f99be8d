#include "src/loss/fused_head.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/ops/int8_weight.h"
#include "tests/loss/head_problem.h"
#include "tests/ops/quantized.h"
#include "tests/support/tolerance.h"

namespace weft::loss {
namespace {

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

std::string CaseName(
    const ::testing::TestParamInfo<FusedHeadTest::ParamType>& test) {
  const auto& [shape, dtype, softcap] = test.param;
  const auto& [rows, chunk] = shape;
  return absl::StrCat("Rows", rows, "_Chunk", chunk < 0 ? "Minus" : "",
                      std::abs(chunk), "_", c10::toString(dtype), "_Softcap",
                      softcap);
}

// 1100 rows: the targets' weights are gathered for 1024 rows at a time.
INSTANTIATE_TEST_SUITE_P(
    RowsAndChunks, FusedHeadTest,
    ::testing::Combine(::testing::Values(std::pair<int64_t, int64_t>{2, 3},
                                         std::pair{8, 3}, std::pair{8, 8},
                                         std::pair{8, 16}, std::pair{1, 1},
                                         std::pair{4, 1}, std::pair{100, 64},
                                         std::pair{1100, 1024}, std::pair{8, 0},
                                         std::pair{100, -1}, std::pair{0, 4}),
                       ::testing::Values(at::kFloat, at::kDouble),
                       ::testing::Values(0.0, 5.0)),
    CaseName);

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

// On a device, the softmax is stored as bf16 weights, and one kernel does the
// last part of the backward pass.
TEST(FusedHeadCudaTest, MatchesDenseAutograd) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const double softcap : {0.0, 30.0}) {
    Problem problem = MakeProblem(40, at::kBFloat16);
    const Oracle oracle = DenseOracle(problem, softcap);
    problem.hidden = problem.hidden.to(at::kCUDA);
    problem.weight = problem.weight.to(at::kCUDA);
    const HeadOptions options{.chunk_rows = 16, .softcap = softcap};
    const HeadResult result = Score(problem, options);
    EXPECT_TRUE(result.scale_R.defined());
    ExpectClose(result.logprobs_E.cpu(), oracle.logprobs,
                Tolerance(kEpsilonF32, kHidden, kLargestLogit));
    ExpectClose(Backward(result, problem, options).cpu(), oracle.dhidden,
                Tolerance(kEpsilonBf16, 1, MaxAbs(oracle.dhidden)));
  }
}

// Up to 64 rows take a kernel that reads the 8-bit weights. For more rows, the
// weights are widened to bf16.
TEST(FusedHeadCudaTest, LogitsOf8BitsAreThoseOfTheNumbers) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(9);
  const at::Tensor stored = QuantizedRows(at::randn({300, 192}));
  for (const int64_t rows : {1, 64, 65}) {
    const at::Tensor hidden = at::randn({rows, 192}).to(at::kBFloat16);
    const at::Tensor numbers =
        ops::Widened(stored, rows > 64 ? at::kBFloat16 : at::kDouble);
    const at::Tensor expected =
        at::mm(hidden.to(at::kDouble), numbers.to(at::kDouble).t());
    ExpectClose(
        HeadLogits(hidden.to(at::kCUDA), stored.to(at::kCUDA), {}, 0, {}).cpu(),
        expected, Tolerance(kEpsilonF32, 192, MaxAbs(expected)));
  }
}

// Row r of the hidden states points at its target's weight, so the target's
// probability p is nearly 1. The gradient is proportional to 1 - p, which must
// keep its significant digits.
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
    // The tolerance is relative to this row's own tiny gradient, plus one
    // rounding of p.
    const double size = MaxAbs(oracle.dhidden[r]);
    const double weight = MaxAbs(problem.weight[r]);
    ExpectClose(
        dhidden[r], oracle.dhidden[r],
        Tolerance(kEpsilonF32, kHidden, 12) * size + kEpsilonF32 * weight);
  }
}

// If the samples of a group also train on their shared prompt, one row has many
// entries with the same target. The gradient is proportional to G (1 - p),
// where G is the sum of the entries' gradients.
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
  const at::Tensor dadapter = problem.Gradient(0);
  // The relative error of 1 - p is the absolute rounding error of the logits.
  const double tolerance = Tolerance(kEpsilonF32, kHidden, kLargestLogit);
  for (const auto& [actual, expected] :
       {std::pair(dhidden, oracle.dhidden),
        std::pair(dadapter, oracle.dadapters[0])}) {
    const double size = MaxAbs(expected);
    EXPECT_GT(size, 0);
    ExpectClose(actual, expected, tolerance * size);
  }
}

TEST(FusedHeadAccuracyTest, FewRowsSumALongVocabularyAsWellAsMany) {
  at::manual_seed(7);
  constexpr int64_t kLong = 40000;
  // All weights have an offset of 1. A BLAS that adds such numbers one by one
  // is off by 1e-5 or more.
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

// Row 0 filters nothing. Row 1 drops probabilities that are too small to matter
// in f32. Row 2 drops all tokens except its target, so only (1 - p) W_t is
// left.
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
  const at::Tensor gradient = problem.Gradient(1).clone();
  problem = MakeProblem(12, at::kFloat, Adapters::kSkewed);
  auto diverged =
      std::make_shared<lora::AdapterVersion>(*problem.rows.routing[0].version);
  diverged->compute_N = at::full_like(diverged->compute_N, std::nan(""));
  problem.rows.routing[0].version = diverged;
  const at::Tensor dhidden = Backward(Score(problem), problem);
  EXPECT_TRUE(dhidden[0].isnan().all().item<bool>());
  EXPECT_TRUE(at::equal(dhidden.narrow(0, 1, 11), dclean.narrow(0, 1, 11)));
  EXPECT_TRUE(at::equal(problem.Gradient(1), gradient));
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
                                  problem.rows, {}, at::ones({1}), {}),
               c10::Error);
}

}  // namespace
}  // namespace weft::loss
