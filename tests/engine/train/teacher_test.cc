// Tests losses with a teacher in whole training steps, and how their sequences
// are packed.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "src/engine/train/prefix_tree.h"
#include "src/engine/train/teacher_packer.h"
#include "src/engine/train/train_runner.h"
#include "tests/engine/train/group_data.h"
#include "tests/model/reference_decoder.h"
#include "tests/model/tiny_model.h"
#include "tests/support/tensors_near.h"

namespace weft::engine::teacher_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;
using ::weft::testing::Join;
using ::weft::testing::RunReference;
using ::weft::testing::Tokens;

// The number of roundings along the path through both layers and the head.
constexpr int64_t kPath = 1000;
// The largest |log p - log q| of these models, by which a loss multiplies the
// errors of logits.
constexpr double kSpread = 10;

// Makes a datum whose reply follows `prompt`. The targets are the next tokens;
// only those of the reply are compared, with different weights.
Datum ReplyDatum(const std::vector<int32_t>& prompt,
                 const std::vector<int32_t>& reply) {
  const std::vector<int32_t> all = Join(prompt, reply);
  Datum datum{.tokens = {all.begin(), all.end() - 1},
              .targets = {all.begin() + 1, all.end()}};
  for (size_t i = 0; i < datum.tokens.size(); ++i) {
    datum.weights.push_back(i + 1 < prompt.size()
                                ? 0.0F
                                : 0.5F + 0.25F * static_cast<float>(i % 4));
  }
  return datum;
}

// Lets the teacher read the same reply after another prompt.
void SetTeacherPrompt(const std::vector<int32_t>& prompt,
                      const std::vector<int32_t>& reply, Datum& datum) {
  datum.teacher_tokens = Join(prompt, {reply.begin(), reply.end() - 1});
  datum.teacher_offset =
      static_cast<int64_t>(datum.teacher_tokens.size()) - datum.num_tokens();
}

TrainRequest Request(LossFunction function, std::vector<Datum> data,
                     double temperature = 1, double beta = 0.5) {
  return {.loss = {.function = function,
                   .beta = beta,
                   .temperature = temperature,
                   .teacher = {.base_model = true}},
          .data = std::move(data)};
}

TrainPiece Piece(const TrainRequest& request,
                 const lora::AdapterVersionPtr& version,
                 const lora::AdapterVersionPtr& teacher = nullptr) {
  return {.request = &request,
          .num_data = static_cast<int64_t>(request.data.size()),
          .version = version,
          .teacher = teacher};
}

struct Outcome {
  std::vector<DatumResult> data;
  std::vector<loss::MetricSums> metrics;
  lora::LoraGradients gradients;
};

class TeacherTest : public ::testing::Test {
 protected:
  TeacherTest()
      : decoder_(TinyDecoder(at::kFloat, /*seed=*/37)),
        executor_(decoder_, {}, {}),
        a_(Version({.rank = 3, .alpha = 6})),
        b_(Version({.rank = 4, .alpha = 4})) {}

  lora::AdapterVersionPtr Version(const LoraConfig& config) const {
    return TinyVersion(decoder_.config(), config, at::kFloat);
  }

  Outcome Run(const std::vector<TrainPiece>& pieces, bool share_prompts = true,
              bool backward = true) {
    std::vector<lora::AdapterVersionPtr> versions;
    for (const TrainPiece& piece : pieces) {
      if (std::ranges::find(versions, piece.version) == versions.end()) {
        versions.push_back(piece.version);
      }
    }
    const lora::LoraGradients gradients =
        lora::ZeroGradients(versions, at::kCPU);
    TrainRunner runner(&executor_, {.share_prompts = share_prompts});
    TrainOutcome outcome =
        runner
            .Run(pieces, backward ? &gradients : nullptr,
                 std::vector<loss::MetricSums>(pieces.size()))
            .value();
    return {.data = std::move(outcome.data),
            .metrics = std::move(outcome.metrics),
            .gradients = gradients};
  }

  // Returns log-probabilities [N, V] in f64 from final hidden rows [N, H].
  at::Tensor LogProbs(const at::Tensor& y_NH, double temperature) const {
    return (at::mm(y_NH, decoder_.weights().head_VH.to(at::kDouble).t()) /
            temperature)
        .log_softmax(1);
  }

  // Returns what the reference decoder computes for the teacher's input alone.
  at::Tensor TeacherLogProbs(const Datum& datum,
                             const lora::AdapterVersionPtr& teacher,
                             double temperature) const {
    const TrainRequest request = {.data = {{.tokens = datum.teacher_input(),
                                            .targets = datum.teacher_input()}}};
    const model::PackedBatch batch =
        PackTrain({Piece(request, teacher)}, false).batch;
    return LogProbs(
        RunReference(decoder_.config(), decoder_.weights(), batch,
                     at::zeros({batch.tokens_T.numel(), 24}, at::kDouble))
            .y_TH,
        temperature);
  }

  const model::Decoder decoder_;
  executor::Executor executor_;
  const lora::AdapterVersionPtr a_, b_;
};

// Returns a row's divergence by its definition.
at::Tensor DivergenceOf(const LossConfig& loss, const at::Tensor& lp,
                        const at::Tensor& lq) {
  const at::Tensor p = lp.exp(), q = lq.exp();
  if (loss.function == LossFunction::kForwardKl) return (q * (lq - lp)).sum();
  if (loss.function == LossFunction::kReverseKl) return (p * (lp - lq)).sum();
  const at::Tensor lm = (loss.beta * q + (1 - loss.beta) * p).log();
  return loss.beta * (q * (lq - lm)).sum() +
         (1 - loss.beta) * (p * (lp - lm)).sum();
}

TEST_F(TeacherTest, MatchesAutogradOfTheWholeStep) {
  Datum told = ReplyDatum(Tokens(5, 3), Tokens(9, 6));
  SetTeacherPrompt(Tokens(20, 7), Tokens(9, 6), told);
  const TrainRequest from_base =
      Request(LossFunction::kForwardKl,
              {ReplyDatum(Tokens(1, 4), Tokens(7, 5)),
               ReplyDatum(Tokens(2, 2), Tokens(8, 3))},
              0.7);
  const TrainRequest from_b = Request(
      LossFunction::kReverseKl, {ReplyDatum(Tokens(3, 5), Tokens(4, 4))}, 1.5);
  const TrainRequest own_words =
      Request(LossFunction::kJs, {told, ReplyDatum(Tokens(6, 3), Tokens(2, 4))},
              1, 0.3);
  const TrainRequest plain = Request(LossFunction::kCrossEntropy,
                                     {ReplyDatum(Tokens(1, 4), Tokens(3, 4))});
  const std::vector<TrainPiece> pieces = {
      Piece(from_base, a_), Piece(from_b, a_, b_), Piece(plain, b_),
      Piece(own_words, b_, b_)};
  const Outcome actual = Run(pieces, /*share_prompts=*/false);

  const model::PackedBatch batch = PackTrain(pieces, false).batch;
  const auto reference = [&](const at::Tensor& dy_TH) {
    return RunReference(decoder_.config(), decoder_.weights(), batch, dy_TH);
  };
  const at::Tensor leaf =
      reference(at::zeros({batch.tokens_T.numel(), 24}, at::kDouble))
          .y_TH.clone()
          .requires_grad_(true);
  at::Tensor sum = at::zeros({}, at::kDouble);
  int64_t row = 0;
  size_t d = 0;
  const double tolerance = kSpread * Tolerance(kEpsilonF32, kPath, 10);
  for (const TrainPiece& piece : pieces) {
    const LossConfig& loss = piece.request->loss;
    const bool has_teacher = HasTeacher(loss.function);
    for (const Datum& datum : piece.request->data) {
      const at::Tensor lp =
          LogProbs(leaf.narrow(0, row, datum.num_tokens()), loss.temperature);
      row += datum.num_tokens();
      at::Tensor lq;
      if (has_teacher) {
        lq = TeacherLogProbs(datum, piece.teacher, loss.temperature);
      }
      const DatumResult& result = actual.data[d++];
      for (int64_t i = 0; i < datum.num_tokens(); ++i) {
        if (datum.weights[i] == 0) {
          EXPECT_EQ(result.losses[i], 0);
          EXPECT_EQ(result.logprobs[i], 0);
          continue;
        }
        const at::Tensor logprob = lp[i][datum.targets[i]];
        const at::Tensor term =
            has_teacher
                ? DivergenceOf(loss, lp[i], lq[i + datum.teacher_offset])
                : -logprob;
        sum = sum + term * datum.weights[i];
        EXPECT_NEAR(result.losses[i], datum.weights[i] * term.item<double>(),
                    tolerance);
        EXPECT_NEAR(result.logprobs[i], logprob.item<double>(), tolerance);
      }
    }
  }
  const at::Tensor dy_TH = torch::autograd::grad({sum}, {leaf})[0];
  const std::vector<at::Tensor> expected = reference(dy_TH).gradients;
  ASSERT_EQ(expected.size(), 2);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_LE(MaxAbs(actual.gradients[i].gradient_N.to(at::kDouble) -
                     expected[i].to(at::kDouble)),
              kSpread * Tolerance(kEpsilonF32, kPath,
                                  std::max(1.0, MaxAbs(expected[i]))));
    EXPECT_GT(MaxAbs(expected[i]), 0.1);
  }
}

TEST_F(TeacherTest, MetricsAreTheMeanDivergenceAndTheWeightedSum) {
  const TrainRequest request = Request(
      LossFunction::kForwardKl, {ReplyDatum(Tokens(1, 4), Tokens(7, 5))});
  const Outcome outcome = Run({Piece(request, a_)});
  const std::map<std::string, double> metrics = outcome.metrics[0].Metrics();
  EXPECT_EQ(metrics.size(), 3);
  double loss = 0, divergence = 0;
  const Datum& datum = request.data[0];
  for (size_t i = 3; i < datum.weights.size(); ++i) {
    loss += outcome.data[0].losses[i];
    divergence += outcome.data[0].losses[i] / datum.weights[i];
  }
  EXPECT_NEAR(metrics.at("loss:sum"), loss, 1e-5);
  EXPECT_NEAR(metrics.at("kl:mean"), divergence / 5, 1e-5);
  EXPECT_EQ(metrics.at("tokens:sum"), 5);
  EXPECT_GT(loss, 0.01);
}

TEST_F(TeacherTest, ForwardAloneGivesTheSameNumbersAndEntropies) {
  TrainRequest request = Request(LossFunction::kReverseKl,
                                 {ReplyDatum(Tokens(1, 4), Tokens(7, 5))}, 1.3);
  request.loss.return_entropy = true;
  const Outcome with = Run({Piece(request, a_, b_)});
  const Outcome without = Run({Piece(request, a_, b_)}, true, false);
  EXPECT_EQ(with.data[0].losses, without.data[0].losses);
  EXPECT_EQ(with.data[0].logprobs, without.data[0].logprobs);
  EXPECT_EQ(with.data[0].entropies, without.data[0].entropies);
  // The entropies are those that cross-entropy returns.
  request.loss.function = LossFunction::kCrossEntropy;
  const Outcome plain = Run({Piece(request, a_)}, true, false);
  EXPECT_THAT(with.data[0].entropies,
              Pointwise(FloatNear(Tolerance(kEpsilonF32, kPath, 10)),
                        plain.data[0].entropies));
  EXPECT_THAT(with.data[0].logprobs,
              Pointwise(FloatNear(Tolerance(kEpsilonF32, kPath, 10)),
                        plain.data[0].logprobs));
}

// The teacher's weights are constants, so the gradient is zero at the minimum.
TEST_F(TeacherTest, AnAdapterLearnsNothingFromItselfButFromAnotherPromptOfIt) {
  Datum datum = ReplyDatum(Tokens(1, 4), Tokens(7, 5));
  const TrainRequest same = Request(LossFunction::kJs, {datum});
  const Outcome none = Run({Piece(same, a_, a_)});
  EXPECT_THAT(none.data[0].losses,
              Each(FloatNear(0, Tolerance(kEpsilonF32, kPath, 1))));
  EXPECT_LE(MaxAbs(none.gradients[0].gradient_N),
            Tolerance(kEpsilonF32, kPath, 1));
  SetTeacherPrompt(Tokens(30, 9), Tokens(7, 5), datum);
  const TrainRequest told = Request(LossFunction::kJs, {datum});
  EXPECT_GT(MaxAbs(Run({Piece(told, a_, a_)}).gradients[0].gradient_N), 1e-3);
}

std::vector<Datum> SharedGroup() {
  std::vector<Datum> data;
  const std::vector<int32_t> prompt = Tokens(3, kMinSavedRows + 4);
  const std::vector<int32_t> told = Tokens(8, kMinSavedRows + 9);
  for (int32_t g = 0; g < 4; ++g) {
    const std::vector<int32_t> reply = Tokens(11 + 2 * g, 5);
    data.push_back(ReplyDatum(prompt, reply));
    SetTeacherPrompt(told, reply, data.back());
  }
  return data;
}

TEST_F(TeacherTest, SharedPromptsOfBothGiveTheSameResults) {
  const TrainRequest request = Request(LossFunction::kForwardKl, SharedGroup());
  const Outcome shared = Run({Piece(request, a_, b_)});
  const Outcome alone = Run({Piece(request, a_, b_)}, /*share_prompts=*/false);
  const double tolerance = kSpread * Tolerance(kEpsilonF32, kPath, 10);
  for (size_t d = 0; d < 4; ++d) {
    EXPECT_THAT(shared.data[d].losses,
                Pointwise(FloatNear(tolerance), alone.data[d].losses));
  }
  EXPECT_LE(
      MaxAbs(shared.gradients[0].gradient_N - alone.gradients[0].gradient_N),
      tolerance);
  // A shared prompt, and four replies of five tokens less the last.
  const executor::DistillPlan plan =
      PackTrain({Piece(request, a_, b_)}, true).distill;
  EXPECT_EQ(plan.batch.tokens_T.numel(), kMinSavedRows + 9 + 4 * 4);
}

TEST_F(TeacherTest, SlicesOfARequestAddUpToTheWhole) {
  const TrainRequest request = Request(LossFunction::kReverseKl, SharedGroup());
  const at::Tensor whole_N =
      Run({Piece(request, a_, b_)}).gradients[0].gradient_N;
  at::Tensor sum_N = at::zeros_like(whole_N);
  TrainPiece slice = Piece(request, a_, b_);
  slice.num_data = 2;
  for (; slice.first_datum < 4; slice.first_datum += 2) {
    sum_N.add_(Run({slice}).gradients[0].gradient_N);
  }
  EXPECT_LE(
      MaxAbs(sum_N - whole_N),
      kSpread * Tolerance(kEpsilonF32, kPath, std::max(1.0, MaxAbs(whole_N))));
}

std::vector<int64_t> Values(const at::Tensor& index) {
  const auto* data = index.const_data_ptr<int64_t>();
  return {data, data + index.numel()};
}

// Two students and two teachers in one batch. Teachers are sorted by version.
TEST_F(TeacherTest, PairsRowsAndCutsWhatIsNotCompared) {
  Datum late{
      .tokens = {1, 2, 3, 4}, .targets = {2, 3, 4, 5}, .weights = {0, 1, 1, 0}};
  Datum moved{.tokens = {9, 3, 4},
              .targets = {3, 4, 5},
              .weights = {1, 1, 0},
              .teacher_tokens = {6, 7, 8, 3, 4, 5},
              .teacher_offset = 2};
  const TrainRequest first = Request(LossFunction::kForwardKl, {late});
  const TrainRequest plain = Request(LossFunction::kCrossEntropy, {late});
  const TrainRequest second = Request(LossFunction::kJs, {moved, late}, 2);
  const PackedTrain packed =
      PackTrain({Piece(first, a_, b_), Piece(plain, a_),
                 Piece(second, b_, nullptr), Piece(first, b_, b_)},
                false);
  const executor::DistillPlan& plan = packed.distill;
  // b_'s sequences come first: those of the first and of the last piece.
  EXPECT_THAT(Values(plan.batch.tokens_T),
              ElementsAre(1, 2, 3, 1, 2, 3, 6, 7, 8, 3, 1, 2, 3));
  ASSERT_EQ(plan.batch.routing.size(), 1);
  EXPECT_EQ(plan.batch.routing[0].version, b_);
  EXPECT_EQ(plan.batch.routing[0].end, 6);
  EXPECT_THAT(Values(plan.student_index_D),
              ElementsAre(1, 2, 8, 9, 12, 13, 16, 17));
  EXPECT_THAT(Values(plan.teacher_index_D),
              ElementsAre(1, 2, 8, 9, 11, 12, 4, 5));
  EXPECT_THAT(plan.rows.scores.targets, ElementsAre(3, 4, 3, 4, 3, 4, 3, 4));
  EXPECT_THAT(plan.rows.scores.temperatures,
              ElementsAre(1, 1, 2, 2, 2, 2, 1, 1));
  const lora::LoraRouting& own = plan.rows.scores.routing;
  ASSERT_EQ(own.size(), 2);
  EXPECT_EQ(own[0].end, 2);
  EXPECT_EQ(own[1].begin, 2);
  EXPECT_EQ(own[1].end, 8);
  const lora::LoraRouting& teachers = plan.rows.teacher_routing;
  ASSERT_EQ(teachers.size(), 2);
  EXPECT_EQ(teachers[0].end, 2);
  EXPECT_EQ(teachers[1].begin, 6);
  // The two entries of the plain datum come before all with a teacher.
  EXPECT_THAT(packed.data[1].entries, ElementsAre(0, 1));
  EXPECT_THAT(packed.data[0].entries, ElementsAre(2, 3));
  EXPECT_THAT(packed.data[4].rows, ElementsAre(8, 9));
}

TEST_F(TeacherTest, ADatumWithoutScoredTokensNeedsNoTeacher) {
  Datum unscored = ReplyDatum(Tokens(1, 4), Tokens(7, 5));
  std::ranges::fill(unscored.weights, 0.0F);
  const TrainRequest request = Request(LossFunction::kForwardKl, {unscored});
  const PackedTrain packed = PackTrain({Piece(request, a_, b_)}, true);
  EXPECT_TRUE(packed.distill.empty());
  const Outcome outcome = Run({Piece(request, a_, b_)});
  EXPECT_THAT(outcome.data[0].losses, Each(0));
  EXPECT_EQ(outcome.metrics[0].Metrics().at("tokens:sum"), 0);
  EXPECT_EQ(MaxAbs(outcome.gradients[0].gradient_N), 0);
}

}  // namespace
}  // namespace weft::engine::teacher_test
