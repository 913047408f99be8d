// Tests the adapters' products in f32 on a CPU for segments of many sizes.
// Compares the products with the formula in f64. Checks that the bits of an
// adapter's results depend only on its own rows. lora_linear_test.cc tests the
// layer with its base.
#include "src/lora/lora_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/lora/mixed_routing.h"
#include "tests/lora/odd_widths.h"
#include "tests/lora/stacked_masked.h"
#include "tests/support/tensors_near.h"

namespace weft::lora::lora_cpu_test {
namespace {

AdapterVersionPtr MakeVersion(int rank) {
  auto version = std::make_shared<AdapterVersion>();
  version->layout = std::make_shared<AdapterLayout>(
      kShape, LoraConfig{.rank = rank, .alpha = 3.0 * rank});
  version->weights_N =
      at::randn({version->layout->num_parameters()}, at::kFloat);
  version->compute_N = version->weights_N;
  return version;
}

// The tensors of a layer's products, all random.
struct Problem {
  LoraSite site;
  LoraRouting routing;
  at::Tensor x_TI, y_TO, dy_TO, dx_TI;

  // Returns the rows [begin, end), without segments.
  Problem Part(int64_t begin, int64_t end) const {
    return {.site = site,
            .x_TI = x_TI.slice(0, begin, end).clone(),
            .y_TO = y_TO.slice(0, begin, end).clone(),
            .dy_TO = dy_TO.slice(0, begin, end).clone(),
            .dx_TI = dx_TI.slice(0, begin, end).clone()};
  }
};

// Lays out the segments in order. Puts `gap` rows without an adapter before
// each segment.
Problem MakeProblem(LoraSite site, const std::vector<int64_t>& sizes,
                    const std::vector<AdapterVersionPtr>& versions,
                    int64_t gap = 3) {
  at::manual_seed(5);
  Problem problem{.site = site, .routing = SideBySide(sizes, versions, gap)};
  const int64_t end = problem.routing.back().end;
  const auto [in, out] = OddWidthsOf(site);
  problem.x_TI = at::randn({end, in});
  problem.dx_TI = at::randn({end, in});
  problem.y_TO = at::randn({end, out});
  problem.dy_TO = at::randn({end, out});
  return problem;
}

struct Result {
  at::Tensor y_TO, dx_TI;
  LoraGradients gradients;
};

Result Evaluate(const Problem& problem) {
  Result result{
      .y_TO = problem.y_TO.clone(),
      .dx_TI = problem.dx_TI.clone(),
      .gradients = ZeroGradients(VersionsOf(problem.routing), at::kCPU)};
  const LoraPass pass{.routing = problem.routing, .shape = kShape};
  const ShrunkInputs shrunk =
      cpu::Forward(problem.x_TI, pass, problem.site, result.y_TO);
  cpu::Backward(problem.dy_TO, problem.x_TI, pass, problem.site, shrunk,
                result.gradients, result.dx_TI);
  return result;
}

// The formulas in f64.
Result Expected(const Problem& problem) {
  const MixedBatch batch = Converted(
      {.routing = problem.routing,
       .gradients = ZeroGradients(VersionsOf(problem.routing), at::kCPU)},
      at::kCPU, at::kDouble, at::kDouble);
  Result result{.y_TO = problem.y_TO.to(at::kDouble),
                .dx_TI = problem.dx_TI.to(at::kDouble),
                .gradients = batch.gradients};
  AddStackedAndMasked(problem.x_TI.to(at::kDouble),
                      problem.dy_TO.to(at::kDouble), batch.routing,
                      batch.gradients, problem.site, kShape, result.y_TO,
                      result.dx_TI);
  return result;
}

void ExpectMatchesTheFormula(const Problem& problem) {
  const Result expected = Expected(problem), actual = Evaluate(problem);
  ExpectNear(actual.y_TO, expected.y_TO, kEpsilonF32, problem.x_TI.size(1),
             "y");
  ExpectNear(actual.dx_TI, expected.dx_TI, kEpsilonF32, problem.dy_TO.size(1),
             "dx");
  for (size_t i = 0; i < actual.gradients.size(); ++i) {
    ExpectNear(actual.gradients[i].gradient_N, expected.gradients[i].gradient_N,
               kEpsilonF32, problem.x_TI.size(0), "gradient");
  }
}

TEST(LoraCpuTest, MatchesTheFormulaForSegmentsOfEverySize) {
  for (const LoraSite& site : {kQkv, kDown}) {
    for (const int64_t rows : {1, 7, 32, 33, 64, 65, 200, 2300}) {
      for (const int rank : {1, 5, 16, 70}) {
        SCOPED_TRACE(::testing::Message() << rows << " rows, rank " << rank);
        ExpectMatchesTheFormula(MakeProblem(site, {rows}, {MakeVersion(rank)}));
      }
    }
  }
}

// A chunk of this segment has more rows than a block of the backward pass.
TEST(LoraCpuTest, MatchesTheFormulaForAVeryLongSegment) {
  ExpectMatchesTheFormula(MakeProblem(kDown, {9000}, {MakeVersion(3)}));
}

TEST(LoraCpuTest, SegmentsOfOneAdapterAddUp) {
  const AdapterVersionPtr one = MakeVersion(4), other = MakeVersion(6);
  ExpectMatchesTheFormula(
      MakeProblem(kQkv, {40, 9, 130, 20}, {one, other, one, other}));
}

TEST(LoraCpuTest, AnAdapterHasTheSameBitsAloneAndWithAnyNumberOfThreads) {
  const std::vector<AdapterVersionPtr> versions = {
      MakeVersion(8), MakeVersion(3), MakeVersion(8), MakeVersion(20)};
  const int num_threads = at::get_num_threads();
  for (const LoraSite& site : {kQkv, kDown}) {
    const Problem all = MakeProblem(site, {20, 100, 64, 300}, versions);
    const Result together = Evaluate(all);
    for (size_t i = 0; i < versions.size(); ++i) {
      const LoraSegment& segment = all.routing[i];
      Problem alone = all.Part(segment.begin, segment.end);
      alone.routing = {{.begin = 0,
                        .end = segment.end - segment.begin,
                        .version = versions[i]}};
      for (const int threads : {1, 2, 5}) {
        at::set_num_threads(threads);
        const Result result = Evaluate(alone);
        EXPECT_TRUE(at::equal(
            result.y_TO, together.y_TO.slice(0, segment.begin, segment.end)));
        EXPECT_TRUE(at::equal(
            result.dx_TI, together.dx_TI.slice(0, segment.begin, segment.end)));
        EXPECT_TRUE(at::equal(result.gradients[0].gradient_N,
                              together.gradients[i].gradient_N));
      }
      at::set_num_threads(num_threads);
    }
  }
}

TEST(LoraCpuTest, LeavesRowsOfNoSegmentAsTheyAre) {
  const Problem problem =
      MakeProblem(kQkv, {40, 70}, {MakeVersion(4), MakeVersion(5)}, /*gap=*/11);
  const Result result = Evaluate(problem);
  for (const LoraSegment& segment : problem.routing) {
    const int64_t begin = segment.begin - 11, end = segment.begin;
    EXPECT_TRUE(at::equal(result.y_TO.slice(0, begin, end),
                          problem.y_TO.slice(0, begin, end)));
    EXPECT_TRUE(at::equal(result.dx_TI.slice(0, begin, end),
                          problem.dx_TI.slice(0, begin, end)));
  }
}

TEST(LoraCpuTest, RefusesTensorsOfOtherDtypes) {
  const Problem problem = MakeProblem(kQkv, {40}, {MakeVersion(4)});
  const LoraPass pass{.routing = problem.routing, .shape = kShape};
  EXPECT_THROW((void)cpu::Forward(problem.x_TI, pass, kQkv,
                                  problem.y_TO.to(at::kDouble)),
               c10::Error);
}

}  // namespace
}  // namespace weft::lora::lora_cpu_test
