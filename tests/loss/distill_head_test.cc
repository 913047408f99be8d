#include "src/loss/distill_head.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/ops/int8_weight.h"
#include "tests/loss/distill_problem.h"
#include "tests/ops/quantized.h"
#include "tests/support/tensors_near.h"

namespace weft::loss {
namespace {

// Compares the gradients of lm_head's adapters.
void ExpectAdapters(const Distillation& made, const DistillOracle& oracle,
                    double epsilon) {
  const lora::LoraRouting& routing = made.rows.scores.routing;
  for (size_t s = 0; s < routing.size(); ++s) {
    const at::Tensor& expected = oracle.scores.dadapters[s];
    if (!expected.defined()) continue;
    EXPECT_GT(MaxAbs(expected), 0);
    ExpectClose(
        made.student.Gradient(s), expected,
        Tolerance(epsilon, kHidden + routing[s].end - routing[s].begin,
                  oracle.spread * std::max(MaxAbs(expected), kLargestLogit)));
  }
}

using Grid = std::tuple<std::pair<int64_t, int64_t>, at::ScalarType, double>;
class DistillHeadTest : public ::testing::TestWithParam<Grid> {};

TEST_P(DistillHeadTest, MatchesDenseAutograd) {
  const auto [shape, dtype, softcap] = GetParam();
  const HeadOptions options{.chunk_rows = shape.second, .softcap = softcap};
  using enum Adapters;
  for (const auto& [student, teacher] : {std::pair{kNone, kNone},
                                         {kOne, kNone},
                                         {kNone, kSkewed},
                                         {kDistinct, kOne},
                                         {kSkewed, kDistinct}}) {
    SCOPED_TRACE(absl::StrCat(static_cast<int>(student), " learn from ",
                              static_cast<int>(teacher)));
    const Distillation made =
        MakeDistillation(shape.first, dtype, student, teacher);
    const DistillOracle oracle = DenseDistillation(made, softcap);
    const double tolerance =
        Tolerance(Epsilon(dtype), kHidden, kLargestLogit * oracle.spread);
    DistillResult result = Compare(made, options);
    ExpectClose(result.logprobs_R, oracle.scores.logprobs, tolerance);
    ExpectClose(result.entropies_R, oracle.scores.entropies, tolerance);
    ExpectClose(result.divergences_R, oracle.divergences, tolerance);
    ExpectClose(CompareBackward(made, std::move(result), options),
                oracle.scores.dhidden, tolerance);
    ExpectAdapters(made, oracle, Epsilon(dtype));
  }
}

std::string DistillCase(
    const ::testing::TestParamInfo<DistillHeadTest::ParamType>& test) {
  const auto& [shape, dtype, softcap] = test.param;
  return absl::StrCat("Rows", shape.first, "_Chunk", shape.second, "_",
                      c10::toString(dtype), "_Softcap", softcap);
}

INSTANTIATE_TEST_SUITE_P(
    RowsAndChunks, DistillHeadTest,
    ::testing::Combine(::testing::Values(std::pair<int64_t, int64_t>{14, 4},
                                         std::pair{14, 14}, std::pair{14, 0},
                                         std::pair{1, 1}, std::pair{150, 64},
                                         std::pair{0, 4}),
                       ::testing::Values(at::kFloat, at::kDouble),
                       ::testing::Values(0.0, 5.0)),
    DistillCase);

TEST(DistillHeadEvalTest, WithoutGradientGivesTheSameDivergences) {
  const Distillation made = MakeDistillation(10, at::kFloat);
  const DistillResult train = Compare(made, {.chunk_rows = 4});
  const DistillResult eval = Compare(made, {.chunk_rows = 4}, false);
  EXPECT_TRUE(at::equal(train.divergences_R, eval.divergences_R));
  EXPECT_TRUE(at::equal(train.logprobs_R, eval.logprobs_R));
  EXPECT_FALSE(eval.projection_RH.defined());
  EXPECT_THROW((void)CompareBackward(made, eval, {}), c10::Error);
}

TEST(DistillHeadEvalTest, ARowDoesNotDependOnOtherRowsDivergences) {
  Distillation made = MakeDistillation(12, at::kFloat);
  const DistillResult mixed = Compare(made, {.chunk_rows = 12});
  for (const Divergence& divergence : AllDivergences()) {
    const std::vector<Divergence> before = made.rows.divergences;
    std::ranges::fill(made.rows.divergences, divergence);
    const DistillResult alone = Compare(made, {.chunk_rows = 12});
    for (int64_t r = 0; r < 12; ++r) {
      if (before[static_cast<size_t>(r)] != divergence) continue;
      EXPECT_TRUE(at::equal(alone.divergences_R[r], mixed.divergences_R[r]));
      EXPECT_TRUE(at::equal(alone.projection_RH[r], mixed.projection_RH[r]));
    }
    made.rows.divergences = before;
  }
}

TEST(DistillHeadBf16Test, DivergencesAreThoseOfF32Logits) {
  const Distillation made =
      MakeDistillation(40, at::kBFloat16, Adapters::kSkewed, Adapters::kOne);
  const DistillOracle oracle = DenseDistillation(made, 0);
  DistillResult result = Compare(made, {});
  const double magnitude = kLargestLogit * oracle.spread;
  ExpectClose(result.divergences_R, oracle.divergences,
              Tolerance(kEpsilonF32, kHidden, magnitude));
  const at::Tensor dhidden = CompareBackward(made, std::move(result), {});
  EXPECT_EQ(dhidden.scalar_type(), at::kBFloat16);
  ExpectClose(dhidden, oracle.scores.dhidden,
              StoredTolerance(kEpsilonBf16, kHidden, magnitude,
                              MaxAbs(oracle.scores.dhidden)));
  ExpectAdapters(made, oracle, kEpsilonF32);
}

TEST(DistillHeadInt8Test, AWeightOf8BitsCountsAsItsNumbers) {
  Distillation made = MakeDistillation(14, at::kFloat);
  const at::Tensor stored = QuantizedRows(at::randn({kVocab, kHidden}));
  made.student.weight = ops::Widened(stored, at::kFloat);
  const DistillOracle oracle = DenseDistillation(made, 0);
  made.student.weight = stored;
  const double tolerance =
      Tolerance(kEpsilonF32, kHidden, kLargestLogit * oracle.spread);
  DistillResult result = Compare(made, {});
  ExpectClose(result.divergences_R, oracle.divergences, tolerance);
  ExpectClose(CompareBackward(made, std::move(result), {}),
              oracle.scores.dhidden, tolerance);
}

// The student is sure of a token to which the teacher gives no probability that
// f32 can hold, and the other way round.
TEST(DistillHeadAccuracyTest, SureAndContraryModelsHaveFiniteGradients) {
  Distillation made = MakeDistillation(12, at::kFloat);
  made.student.weight = at::zeros({kVocab, kHidden});
  made.student.weight[0][0] = 1;
  made.student.weight[1][0] = -1;
  made.student.hidden = at::zeros({12, kHidden});
  made.student.hidden.select(1, 0).fill_(150);
  made.teacher.hidden = -made.student.hidden;
  std::ranges::fill(made.rows.scores.temperatures, 1.0F);
  const DistillOracle oracle = DenseDistillation(made, 0);
  DistillResult result = Compare(made, {});
  // 300 nats apart, whose logits have errors of 150 epsilon.
  ExpectClose(result.divergences_R, oracle.divergences,
              Tolerance(kEpsilonF32, 1, 300));
  ExpectClose(CompareBackward(made, std::move(result), {}),
              oracle.scores.dhidden, Tolerance(kEpsilonF32, 1, 300));
  // JS is at most log 2, whatever the logits are.
  EXPECT_NEAR(oracle.divergences[6].item<double>(), std::log(2.0), 1e-12);
}

TEST(DistillHeadAccuracyTest, AModelHasNoDivergenceFromItself) {
  Distillation made = MakeDistillation(12, at::kFloat);
  made.teacher.hidden = made.student.hidden;
  DistillResult result = Compare(made, {});
  EXPECT_TRUE(at::equal(result.divergences_R, at::zeros({12})) ||
              MaxAbs(result.divergences_R) <=
                  Tolerance(kEpsilonF32, kVocab, 1));
  EXPECT_LE(MaxAbs(CompareBackward(made, std::move(result), {})),
            Tolerance(kEpsilonF32, kVocab, 1));
}

// Adds up LibTorch's allocations on this thread.
class MemoryWatch final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*at*/, int64_t bytes, size_t /*allocated*/,
                         size_t /*reserved*/, c10::Device /*device*/) override {
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t peak() const { return peak_; }

 private:
  int64_t now_ = 0;
  int64_t peak_ = 0;
};

int64_t PeakBytes(const std::function<void()>& run) {
  const auto watch = std::make_shared<MemoryWatch>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, watch);
  run();
  return watch->peak();
}

TEST(DistillHeadMemoryTest, TakesOneBufferMoreThanTheFusedHead) {
  const at::InferenceMode no_autograd;
  constexpr int64_t kRows = 512;
  constexpr int64_t kLarge = 8192;
  const at::Tensor hidden = at::randn({kRows, kHidden});
  const at::Tensor teacher = at::randn({kRows, kHidden});
  const at::Tensor weight = at::randn({kLarge, kHidden});
  DistillRows rows;
  rows.scores.row_offsets.push_back(0);
  for (int64_t r = 0; r < kRows; ++r) {
    rows.scores.row_offsets.push_back(r + 1);
    rows.scores.targets.push_back(r);
    rows.scores.temperatures.push_back(1);
    rows.divergences.push_back(AllDivergences()[r % AllDivergences().size()]);
  }
  const int64_t buffer = kRows * kLarge * static_cast<int64_t>(sizeof(float));
  const int64_t fused = PeakBytes(
      [&] { (void)ScoreHead(hidden, weight, rows.scores, {}, true, true); });
  const int64_t distilled = PeakBytes([&] {
    (void)ScoreDistillation(hidden, teacher, weight, rows, {}, true, true);
  });
  EXPECT_GE(fused, buffer);
  // Besides the buffer: a block's temporaries, and a few numbers for each row.
  EXPECT_LE(distilled - fused, buffer + DistillBlockBytes(kLarge, true) +
                                   kRows * (kHidden + 32) * 8);
}

TEST(DistillHeadRefusalTest, RowsThatDoNotPairThrow) {
  Distillation made = MakeDistillation(4, at::kFloat);
  made.teacher.hidden = at::randn({3, kHidden});
  EXPECT_THROW((void)Compare(made, {}), c10::Error);
  made = MakeDistillation(4, at::kFloat);
  made.rows.divergences.pop_back();
  EXPECT_THROW((void)Compare(made, {}), c10::Error);
  made = MakeDistillation(4, at::kFloat);
  made.rows.divergences[0].function = LossFunction::kPpo;
  EXPECT_THROW((void)Compare(made, {}), c10::Error);
}

}  // namespace
}  // namespace weft::loss
