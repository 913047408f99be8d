// Tests score rows whose distributions have only some tokens.
#include "src/loss/head_support.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "src/loss/fused_head.h"
#include "src/ops/int8_weight.h"
#include "tests/loss/head_problem.h"
#include "tests/ops/quantized.h"
#include "tests/support/tolerance.h"

namespace weft::loss {
namespace {

Problem MakeSupported(int64_t num_rows, at::ScalarType dtype,
                      Adapters adapters = Adapters::kNone) {
  Problem problem = MakeProblem(num_rows, dtype, adapters);
  AddSupports(problem.rows);
  return problem;
}

TEST(HeadSupportTest, MatchesDenseAutogradOverTheSupport) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const double softcap : {0.0, 5.0}) {
      for (const int64_t chunk : {0, 7, 64}) {
        for (const Adapters adapters :
             {Adapters::kNone, Adapters::kDistinct, Adapters::kSkewed}) {
          SCOPED_TRACE(::testing::Message()
                       << dtype << ", softcap " << softcap << ", chunk "
                       << chunk << ", adapters " << static_cast<int>(adapters));
          const HeadOptions options{.chunk_rows = chunk, .softcap = softcap};
          const Problem problem = MakeSupported(40, dtype, adapters);
          const Oracle oracle = DenseOracle(problem, softcap);
          const HeadResult result = Score(problem, options, true, true);
          const double tolerance =
              Tolerance(Epsilon(dtype), kHidden, kLargestLogit);
          ExpectClose(result.logprobs_E, oracle.logprobs, tolerance);
          ExpectClose(result.entropies_R, oracle.entropies, tolerance);
          ExpectClose(Backward(result, problem, options), oracle.dhidden,
                      tolerance);
          ExpectAdaptersClose(problem, oracle, Epsilon(dtype));
          const HeadResult eval = Score(problem, options, false, false);
          EXPECT_TRUE(at::equal(eval.logprobs_E, result.logprobs_E));
        }
      }
    }
  }
}

TEST(HeadSupportTest, MatchesDenseAutogradInBf16) {
  const Problem problem = MakeSupported(40, at::kBFloat16, Adapters::kSkewed);
  const Oracle oracle = DenseOracle(problem, 0);
  const HeadResult result = Score(problem);
  ExpectClose(result.logprobs_E, oracle.logprobs,
              Tolerance(kEpsilonF32, kHidden, kLargestLogit));
  ExpectClose(Backward(result, problem), oracle.dhidden,
              Tolerance(kEpsilonBf16, 1, 10));
  ExpectAdaptersClose(problem, oracle, kEpsilonF32);
}

TEST(HeadSupportTest, MatchesDenseAutogradWith8BitWeights) {
  Problem problem = MakeSupported(12, at::kFloat);
  const at::Tensor stored = QuantizedRows(problem.weight);
  problem.weight = ops::Widened(stored, at::kFloat);
  const Oracle oracle = DenseOracle(problem, 0);
  problem.weight = stored;
  const HeadResult result = Score(problem);
  const double tolerance = Tolerance(kEpsilonF32, kHidden, kLargestLogit);
  ExpectClose(result.logprobs_E, oracle.logprobs, tolerance);
  ExpectClose(Backward(result, problem), oracle.dhidden, tolerance);
}

// On a device, the softmax is stored as bf16 weights with a factor per row.
TEST(HeadSupportCudaTest, MatchesDenseAutograd) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const double softcap : {0.0, 30.0}) {
    Problem problem = MakeSupported(40, at::kBFloat16);
    const Oracle oracle = DenseOracle(problem, softcap);
    problem.hidden = problem.hidden.to(at::kCUDA);
    problem.weight = problem.weight.to(at::kCUDA);
    const HeadOptions options{.chunk_rows = 16, .softcap = softcap};
    const HeadResult result = Score(problem, options, true, true);
    EXPECT_TRUE(result.scale_R.defined());
    const double tolerance = Tolerance(kEpsilonF32, kHidden, kLargestLogit);
    ExpectClose(result.logprobs_E.cpu(), oracle.logprobs, tolerance);
    ExpectClose(result.entropies_R.cpu(), oracle.entropies, tolerance);
    ExpectClose(Backward(result, problem, options).cpu(), oracle.dhidden,
                Tolerance(kEpsilonBf16, 1, MaxAbs(oracle.dhidden)));
  }
}

TEST(HeadSupportTest, RowsWithoutASupportKeepTheirBits) {
  for (const double softcap : {0.0, 5.0}) {
    const HeadOptions options{.chunk_rows = 6, .softcap = softcap};
    const Problem plain = MakeProblem(20, at::kFloat);
    const HeadResult before = Score(plain, options, true, true);
    const Problem problem = MakeSupported(20, at::kFloat);
    const HeadResult after = Score(problem, options, true, true);
    const at::Tensor dbefore = Backward(before, plain, options);
    const at::Tensor dafter = Backward(after, problem, options);
    for (int64_t r = 0; r < 20; ++r) {
      SCOPED_TRACE(r);
      const bool is_plain = r % 4 == 3;
      EXPECT_EQ(at::equal(after.entropies_R[r], before.entropies_R[r]),
                is_plain);
      EXPECT_EQ(at::equal(dafter[r], dbefore[r]), is_plain);
      const int64_t first = problem.rows.row_offsets[r];
      EXPECT_EQ(at::equal(after.logprobs_E[first], before.logprobs_E[first]),
                is_plain);
    }
  }
}

// A row whose only token is its target learns nothing: the probability is 1.
TEST(HeadSupportTest, OneTokenHasNoGradient) {
  Problem problem = MakeProblem(1, at::kFloat);
  problem.rows.supports = {
      .rows = {0},
      .offsets = {0, 1},
      .ids = {static_cast<int32_t>(problem.rows.targets.front())}};
  const HeadResult result = Score(problem, {}, true, true);
  EXPECT_EQ(result.logprobs_E.item<float>(), 0);
  EXPECT_EQ(result.entropies_R.item<float>(), 0);
  EXPECT_TRUE(at::equal(Backward(result, problem),
                        at::zeros({1, kHidden}, at::kFloat)));
}

// The gradient filter sees the probabilities of the support. Those of the first
// row are all above its filter, so it is exact. The second row's filter leaves
// out all tokens but the target.
TEST(HeadSupportTest, FiltersSeeTheProbabilitiesOfTheSupport) {
  Problem problem = MakeProblem(2, at::kFloat);
  problem.hidden.mul_(0.01);  // Nearly equal probabilities.
  problem.rows.row_offsets = {0, 1, 2};
  problem.rows.targets = {3, 5};
  problem.g = at::ones({2}, at::kFloat);
  problem.rows.supports = {.rows = {0, 1},
                           .offsets = {0, 4, 8},
                           .ids = {3, 9, 60, 70, 5, 9, 60, 70}};
  const Oracle oracle = DenseOracle(problem, 0);
  problem.rows.filters = {0.1F, 0.9F};
  const HeadResult result = Score(problem);
  const at::Tensor dhidden = Backward(result, problem);
  const double tolerance = Tolerance(kEpsilonF32, kHidden, kLargestLogit);
  ExpectClose(dhidden[0], oracle.dhidden[0], tolerance);
  const double p = std::exp(result.logprobs_E[1].item<double>());
  ExpectClose(dhidden[1],
              problem.weight[5].to(at::kDouble) *
                  ((1 - p) / problem.rows.temperatures[1]),
              tolerance);
}

TEST(HeadSupportNanTest, StaysInItsRow) {
  Problem problem = MakeSupported(8, at::kFloat);
  const HeadResult clean = Score(problem, {.chunk_rows = 4}, true, true);
  const at::Tensor dclean = Backward(clean, problem);
  problem.hidden[5][0] = std::nan("");
  const HeadResult result = Score(problem, {.chunk_rows = 4}, true, true);
  const at::Tensor dhidden = Backward(result, problem);
  EXPECT_TRUE(dhidden[5].isnan().all().item<bool>());
  EXPECT_TRUE(result.entropies_R[5].isnan().item<bool>());
  for (const int64_t row : {0, 1, 2, 3, 4, 6, 7}) {
    EXPECT_TRUE(at::equal(dhidden[row], dclean[row]));
    EXPECT_TRUE(at::equal(result.entropies_R[row], clean.entropies_R[row]));
  }
}

TEST(HeadSupportRefusalTest, InconsistentSupportsThrow) {
  Problem problem = MakeSupported(4, at::kFloat);
  problem.rows.supports.ids.pop_back();
  EXPECT_THROW((void)Score(problem), c10::Error);
  problem = MakeSupported(4, at::kFloat);
  problem.rows.supports.offsets.pop_back();
  EXPECT_THROW((void)Score(problem), c10::Error);
}

TEST(SupportsOfShardTest, KeepsAllRowsAndCountsIdsFromTheShard) {
  const RowSupports whole{
      .rows = {2, 5}, .offsets = {0, 3, 5}, .ids = {1, 10, 19, 0, 30}};
  const RowSupports own = SupportsOfShard(whole, 10, 20);
  EXPECT_EQ(own.rows, whole.rows);
  EXPECT_EQ(own.offsets, (std::vector<int64_t>{0, 2, 2}));
  EXPECT_EQ(own.ids, (std::vector<int32_t>{0, 9}));
  EXPECT_TRUE(SupportsOfShard({}, 10, 20).offsets.empty());
}

}  // namespace
}  // namespace weft::loss
