// Tests the head with a vocabulary that several ranks share.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/lora/adapter_shard.h"
#include "src/loss/fused_head.h"
#include "tests/loss/distill_problem.h"
#include "tests/loss/head_problem.h"
#include "tests/support/ranks.h"
#include "tests/support/tolerance.h"

namespace weft::loss {
namespace {

// The lm_head adapters of one rank, with only the rows of B for the rank's part
// of the vocabulary.
class SegmentParts {
 public:
  SegmentParts(const lora::LoraRouting& whole, const parallel::Range& vocab)
      : routing_(whole), vocab_(vocab) {
    for (lora::LoraSegment& segment : routing_) {
      const lora::AdapterVersion& version = *segment.version;
      if (version.layout->factors().empty()) continue;
      const auto rank = static_cast<int>(version.layout->factors()[0].rank);
      auto local = std::make_shared<lora::AdapterVersion>();
      local->layout = std::make_shared<lora::AdapterLayout>(
          model_config::ModelShape{.hidden = kHidden, .vocab = vocab.size()},
          LoraConfig{.rank = rank,
                     .alpha = 6,
                     .target_modules = {TargetModule::kLmHead}});
      local->compute_N =
          ShardOf(version, *local->layout).Slice(version.compute_N);
      segment.version = local;
    }
    gradients_ = HeadGradients(routing_);
  }

  const lora::LoraRouting& routing() const { return routing_; }
  const lora::LoraGradients& gradients() const { return gradients_; }

  void AddGradientsTo(const Problem& whole) const {
    for (size_t s = 0; s < routing_.size(); ++s) {
      at::Tensor gradient_N = whole.Gradient(s);
      if (!gradient_N.defined()) continue;
      const lora::AdapterVersionPtr& own = routing_[s].version;
      ShardOf(*whole.rows.routing[s].version, *own->layout)
          .AddTo(GradientOf(gradients_, own), gradient_N);
    }
  }

 private:
  lora::AdapterShard ShardOf(const lora::AdapterVersion& whole,
                             const lora::AdapterLayout& local) const {
    return {*whole.layout, local, {.vocab = vocab_}};
  }

  lora::LoraRouting routing_;
  lora::LoraGradients gradients_;
  parallel::Range vocab_;
};

struct Outcome {
  at::Tensor logprobs_E;
  at::Tensor entropies_R;
  at::Tensor dhidden_RH;
};

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  const auto bits = [](const at::Tensor& x) {
    return x.contiguous().view(x.scalar_type() == at::kDouble ? at::kLong
                                                              : at::kInt);
  };
  return at::equal(bits(a), bits(b));
}

// Runs forward and backward on `size` ranks, whose results must have equal
// bits. Adds the adapters' gradients to `problem.gradients`.
Outcome RunOnRanks(const Problem& problem, HeadOptions options, int size) {
  std::mutex mutex;
  Outcome outcome;
  RunRanks(size, [&](parallel::Communicator& group) {
    const parallel::Range vocab = group.shard().Of(kVocab);
    const SegmentParts parts(problem.rows.routing, vocab);
    Problem local = problem;
    local.weight = problem.weight.slice(0, vocab.begin, vocab.end).contiguous();
    local.rows.routing = parts.routing();
    local.gradients = parts.gradients();
    HeadOptions own = options;
    own.shard = {.group = &group, .vocab = kVocab};
    const HeadResult result = Score(local, own, true, true);
    const HeadResult eval = Score(local, own, false, false);
    EXPECT_TRUE(SameBits(eval.logprobs_E, result.logprobs_E));
    const at::Tensor dhidden_RH = Backward(result, local, own);
    const std::lock_guard lock(mutex);
    parts.AddGradientsTo(problem);
    if (!outcome.dhidden_RH.defined()) {
      outcome = {result.logprobs_E, result.entropies_R, dhidden_RH};
    }
    EXPECT_TRUE(SameBits(result.logprobs_E, outcome.logprobs_E));
    EXPECT_TRUE(SameBits(result.entropies_R, outcome.entropies_R));
    EXPECT_TRUE(SameBits(dhidden_RH, outcome.dhidden_RH));
  });
  return outcome;
}

void ExpectDenseAutograd(int size, int64_t num_rows, at::ScalarType dtype,
                         const HeadOptions& options, Adapters adapters) {
  SCOPED_TRACE(::testing::Message()
               << num_rows << " rows of adapters " << static_cast<int>(adapters)
               << " in " << dtype << ", softcap " << options.softcap);
  const Problem problem = MakeProblem(num_rows, dtype, adapters);
  const Oracle oracle = DenseOracle(problem, options.softcap);
  const Outcome outcome = RunOnRanks(problem, options, size);
  const double tolerance = Tolerance(Epsilon(dtype), kHidden, kLargestLogit);
  ExpectClose(outcome.logprobs_E, oracle.logprobs, tolerance);
  ExpectClose(outcome.entropies_R, oracle.entropies, tolerance);
  ExpectClose(outcome.dhidden_RH, oracle.dhidden, tolerance);
  ExpectAdaptersClose(problem, oracle, Epsilon(dtype));
}

class VocabShardTest : public ::testing::TestWithParam<int> {};

TEST_P(VocabShardTest, MatchesDenseAutograd) {
  for (const auto& [num_rows, chunk_rows] :
       {std::pair{8, 3}, std::pair{1, 1}, std::pair{20, 16}, std::pair{0, 4}}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      for (const double softcap : {0.0, 5.0}) {
        for (const Adapters adapters :
             {Adapters::kNone, Adapters::kOne, Adapters::kDistinct,
              Adapters::kSkewed}) {
          ExpectDenseAutograd(GetParam(), num_rows, dtype,
                              {.chunk_rows = chunk_rows, .softcap = softcap},
                              adapters);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EverySize, VocabShardTest, ::testing::Values(2, 3, 4),
                         [](const auto& test) {
                           return absl::StrCat("Ranks", test.param);
                         });

// Compares with a teacher on `size` ranks, whose results must have equal bits.
// Adds the gradients of the student's adapters to `made`.
std::pair<DistillResult, at::Tensor> CompareOnRanks(const Distillation& made,
                                                    const HeadOptions& options,
                                                    int size) {
  std::mutex mutex;
  DistillResult first;
  at::Tensor first_dhidden_RH;
  RunRanks(size, [&](parallel::Communicator& group) {
    const parallel::Range vocab = group.shard().Of(kVocab);
    const SegmentParts parts(made.rows.scores.routing, vocab);
    const SegmentParts teacher(made.rows.teacher_routing, vocab);
    Distillation local = made;
    local.student.weight =
        made.student.weight.slice(0, vocab.begin, vocab.end).contiguous();
    local.rows.scores.routing = parts.routing();
    local.rows.teacher_routing = teacher.routing();
    local.student.gradients = parts.gradients();
    HeadOptions own = options;
    own.shard = {.group = &group, .vocab = kVocab};
    const DistillResult result = Compare(local, own);
    const at::Tensor dhidden_RH = CompareBackward(local, result, own);
    const std::lock_guard lock(mutex);
    parts.AddGradientsTo(made.student);
    if (!first_dhidden_RH.defined()) {
      first = result;
      first_dhidden_RH = dhidden_RH;
    }
    EXPECT_TRUE(SameBits(result.divergences_R, first.divergences_R));
    EXPECT_TRUE(SameBits(result.logprobs_R, first.logprobs_R));
    EXPECT_TRUE(SameBits(dhidden_RH, first_dhidden_RH));
  });
  return {first, first_dhidden_RH};
}

TEST_P(VocabShardTest, DistillationMatchesDenseAutograd) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const double softcap : {0.0, 5.0}) {
      const Distillation made =
          MakeDistillation(14, dtype, Adapters::kSkewed, Adapters::kDistinct);
      const DistillOracle oracle = DenseDistillation(made, softcap);
      const auto [result, dhidden_RH] = CompareOnRanks(
          made, {.chunk_rows = 4, .softcap = softcap}, GetParam());
      const double tolerance =
          Tolerance(Epsilon(dtype), kHidden, kLargestLogit * oracle.spread);
      ExpectClose(result.divergences_R, oracle.divergences, tolerance);
      ExpectClose(result.logprobs_R, oracle.scores.logprobs, tolerance);
      ExpectClose(result.entropies_R, oracle.scores.entropies, tolerance);
      ExpectClose(dhidden_RH, oracle.scores.dhidden, tolerance);
      for (size_t s = 0; s < made.rows.scores.routing.size(); ++s) {
        const at::Tensor& expected = oracle.scores.dadapters[s];
        if (!expected.defined()) continue;
        ExpectClose(made.student.Gradient(s), expected,
                    Tolerance(Epsilon(dtype), kHidden + 14,
                              oracle.spread *
                                  std::max(MaxAbs(expected), kLargestLogit)));
      }
    }
  }
}

// One rank has all targets, so the other ranks have chunks without entries.
TEST_P(VocabShardTest, TargetsMayAllBeOnOneRank) {
  for (const int owner : {0, GetParam() - 1}) {
    for (const double softcap : {0.0, 5.0}) {
      Problem problem = MakeProblem(8, at::kFloat, Adapters::kSkewed);
      const parallel::Range own =
          parallel::Shard{.rank = owner, .size = GetParam()}.Of(kVocab);
      for (int64_t& target : problem.rows.targets) {
        target = own.begin + target % own.size();
      }
      const Oracle oracle = DenseOracle(problem, softcap);
      const Outcome outcome = RunOnRanks(
          problem, {.chunk_rows = 3, .softcap = softcap}, GetParam());
      const double tolerance = Tolerance(kEpsilonF32, kHidden, kLargestLogit);
      ExpectClose(outcome.logprobs_E, oracle.logprobs, tolerance);
      ExpectClose(outcome.dhidden_RH, oracle.dhidden, tolerance);
      ExpectAdaptersClose(problem, oracle, kEpsilonF32);
    }
  }
}

// Some rows have no token of their support on some ranks, or only one rank with
// tokens. NaN of such a rank would be seen.
TEST_P(VocabShardTest, SupportsMayLieOnSomeRanksAlone) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const double softcap : {0.0, 5.0}) {
      Problem problem = MakeProblem(24, dtype, Adapters::kSkewed);
      AddSupports(problem.rows);
      const Oracle oracle = DenseOracle(problem, softcap);
      const Outcome outcome = RunOnRanks(
          problem, {.chunk_rows = 5, .softcap = softcap}, GetParam());
      const double tolerance =
          Tolerance(Epsilon(dtype), kHidden, kLargestLogit);
      ExpectClose(outcome.logprobs_E, oracle.logprobs, tolerance);
      ExpectClose(outcome.entropies_R, oracle.entropies, tolerance);
      ExpectClose(outcome.dhidden_RH, oracle.dhidden, tolerance);
      ExpectAdaptersClose(problem, oracle, Epsilon(dtype));
    }
  }
}

// Row r of the hidden states points at its target's weight, so the target's
// probability p is nearly 1. The gradient is proportional to 1 - p, which must
// keep its significant digits even after the exchange between ranks.
TEST(VocabShardAccuracyTest, SurePredictionsKeepTheirDigits) {
  Problem problem = MakeProblem(8, at::kFloat);
  problem.rows = {.row_offsets = {0}};
  for (int64_t r = 0; r < 8; ++r) {
    const at::Tensor target = problem.weight[r * 25];
    problem.hidden[r] = target * (12 / target.square().sum());
    problem.rows.targets.push_back(r * 25);
    problem.rows.row_offsets.push_back(r + 1);
    problem.rows.temperatures.push_back(1.0F);
  }
  problem.g = at::ones({8}, at::kFloat);
  const Oracle oracle = DenseOracle(problem, 0);
  const Outcome outcome = RunOnRanks(problem, {}, /*size=*/3);
  for (int64_t r = 0; r < 8; ++r) {
    // The tolerance is relative to this row's own tiny gradient, plus one
    // rounding of p.
    const double size = MaxAbs(oracle.dhidden[r]);
    const double weight = MaxAbs(problem.weight[r * 25]);
    ExpectClose(
        outcome.dhidden_RH[r], oracle.dhidden[r],
        Tolerance(kEpsilonF32, kHidden, 12) * size + kEpsilonF32 * weight);
  }
}

// Filters compare probabilities over the whole vocabulary. `largest` is the
// largest probability of a token other than the target. A filter just above
// `largest` keeps only the target. If each rank took the softmax over its own
// part of the vocabulary, this filter would also keep the token that has
// probability `largest`. A filter below `largest` also keeps that other
// token's block.
TEST(VocabShardFilterTest, FiltersAreForTheWholeVocabulary) {
  Problem problem = MakeProblem(1, at::kFloat);
  problem.hidden.mul_(0.1);  // This spreads the probability over all ranks.
  problem.rows.targets = {3};
  problem.rows.row_offsets = {0, 1};
  problem.g = at::ones({1}, at::kFloat);
  const at::Tensor z_V =
      problem.weight.mv(problem.hidden[0]) / problem.rows.temperatures[0];
  at::Tensor p_V = z_V.softmax(0);
  const double p = p_V[3].item<double>();
  p_V[3] = 0;
  const float largest = p_V.max().item<float>();
  const Oracle oracle = DenseOracle(problem, 0);
  const double temperature = problem.rows.temperatures[0];
  const at::Tensor alone =
      problem.weight.narrow(0, 3, 1).to(at::kDouble) * ((1 - p) / temperature);
  const double tolerance = Tolerance(kEpsilonF32, kHidden, kLargestLogit);
  problem.rows.filters = {largest * 1.01F};
  ExpectClose(RunOnRanks(problem, {}, /*size=*/4).dhidden_RH, alone, tolerance);
  problem.rows.filters = {largest * 0.99F};
  const at::Tensor kept = RunOnRanks(problem, {}, /*size=*/4).dhidden_RH;
  EXPECT_GT((kept - alone).abs().max().item<double>(), 0.001);
  problem.rows.filters = {1e-30F};
  ExpectClose(RunOnRanks(problem, {}, /*size=*/4).dhidden_RH, oracle.dhidden,
              tolerance);
}

TEST(VocabShardNanTest, OfOneRowIsSeenByAllRanksAndStaysInItsRow) {
  Problem problem = MakeProblem(6, at::kFloat);
  const Outcome clean = RunOnRanks(problem, {}, /*size=*/3);
  problem.hidden[4][0] = std::nan("");
  const Outcome outcome = RunOnRanks(problem, {}, /*size=*/3);
  EXPECT_TRUE(outcome.dhidden_RH[4].isnan().all().item<bool>());
  EXPECT_TRUE(outcome.entropies_R[4].isnan().item<bool>());
  for (const int64_t row : {0, 1, 2, 3, 5}) {
    EXPECT_TRUE(at::equal(outcome.dhidden_RH[row], clean.dhidden_RH[row]));
    EXPECT_TRUE(at::equal(outcome.entropies_R[row], clean.entropies_R[row]));
  }
}

TEST(VocabShardNanTest, OfOneRanksWeightIsSeenByAllRanks) {
  Problem problem = MakeProblem(6, at::kFloat);
  problem.weight[kVocab - 1] = std::nan("");
  const Outcome outcome = RunOnRanks(problem, {}, /*size=*/3);
  EXPECT_TRUE(outcome.logprobs_E.isnan().all().item<bool>());
  EXPECT_TRUE(outcome.entropies_R.isnan().all().item<bool>());
  EXPECT_TRUE(outcome.dhidden_RH.isnan().all().item<bool>());
}

TEST(VocabShardLogitsTest, EveryRankGetsThoseOfTheWholeVocabulary) {
  const Problem problem = MakeProblem(5, at::kFloat, Adapters::kSkewed);
  for (const double softcap : {0.0, 5.0}) {
    const at::Tensor expected = HeadLogits(problem.hidden, problem.weight,
                                           problem.rows.routing, softcap);
    for (const int size : {2, 3}) {
      RunRanks(size, [&](parallel::Communicator& group) {
        const parallel::Range vocab = group.shard().Of(kVocab);
        const SegmentParts parts(problem.rows.routing, vocab);
        const at::Tensor logits = HeadLogits(
            problem.hidden, problem.weight.slice(0, vocab.begin, vocab.end),
            parts.routing(), softcap, {.group = &group, .vocab = kVocab});
        EXPECT_TRUE(logits.is_contiguous());
        ExpectClose(logits, expected.to(at::kDouble),
                    Tolerance(kEpsilonF32, kHidden, kLargestLogit));
      });
    }
  }
}

TEST(VocabShardRefusalTest, WeightsOfAnotherPartThrow) {
  const Problem problem = MakeProblem(3, at::kFloat);
  RunRanks(2, [&](parallel::Communicator& group) {
    const HeadOptions options{.shard = {.group = &group, .vocab = kVocab}};
    EXPECT_THROW((void)Score(problem, options), c10::Error);
  });
}

}  // namespace
}  // namespace weft::loss
