#include "src/engine/train/train_runner.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "src/engine/train/prefix_tree.h"
#include "tests/model/reference_decoder.h"
#include "tests/model/tiny_model.h"
#include "tests/support/tensors_near.h"

namespace weft::engine::train_runner_test {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;
using ::weft::testing::ReferenceResult;
using ::weft::testing::RunReference;

// The number of roundings along the path through both layers and the head.
constexpr int64_t kPath = 1000;

// Makes a datum of `length` tokens that count up from `first` in steps of 5.
// The target of a token is the next token. Every third token is not scored, and
// the others have different weights.
Datum MakeDatum(int32_t first, int32_t length) {
  Datum datum;
  for (int32_t i = 0; i < length; ++i) {
    datum.tokens.push_back((first + 5 * i) % 53);
    datum.targets.push_back((first + 5 * i + 5) % 53);
    datum.weights.push_back(
        i % 3 == 1 ? 0.0F : 0.5F + 0.25F * static_cast<float>(i % 4));
  }
  return datum;
}

TrainRequest Request(std::vector<Datum> data, double temperature = 1) {
  return {.loss = {.temperature = temperature}, .data = std::move(data)};
}

struct Outcome {
  std::vector<DatumResult> data;
  std::vector<loss::MetricSums> metrics;
  lora::LoraGradients gradients;

  at::Tensor Gradient(const lora::AdapterVersionPtr& version) const {
    return GradientOf(gradients, version);
  }
};

class TrainRunnerTest : public ::testing::Test {
 protected:
  TrainRunnerTest()
      : decoder_(TinyDecoder(at::kFloat, /*seed=*/37)),
        executor_(decoder_, {}, {}),
        runner_(&executor_, TrainRunnerOptions()),
        a_(Version({.rank = 3, .alpha = 6})),
        b_(Version({.rank = 4, .alpha = 4})) {}

  lora::AdapterVersionPtr Version(const LoraConfig& config) const {
    return TinyVersion(decoder_.config(), config, at::kFloat);
  }

  static TrainPiece Piece(const TrainRequest& request,
                          const lora::AdapterVersionPtr& version) {
    return {.request = &request,
            .num_data = static_cast<int64_t>(request.data.size()),
            .version = version};
  }

  // Adds to `gradients`. If `gradients` is null, runs only the forward pass.
  Outcome Run(const std::vector<TrainPiece>& pieces,
              const lora::LoraGradients* gradients) {
    TrainOutcome outcome =
        runner_
            .Run(pieces, gradients,
                 std::vector<loss::MetricSums>(pieces.size()))
            .value();
    return {
        .data = std::move(outcome.data),
        .metrics = std::move(outcome.metrics),
        .gradients = gradients == nullptr ? lora::LoraGradients() : *gradients};
  }
  // Runs the pieces with gradients that start at zero.
  Outcome Run(const std::vector<TrainPiece>& pieces) {
    std::vector<lora::AdapterVersionPtr> versions;
    for (const TrainPiece& piece : pieces) versions.push_back(piece.version);
    versions.erase(std::ranges::unique(versions).begin(), versions.end());
    const lora::LoraGradients gradients =
        lora::ZeroGradients(versions, at::kCPU);
    return Run(pieces, &gradients);
  }

  const model::Decoder decoder_;
  executor::Executor executor_;
  TrainRunner runner_;
  const lora::AdapterVersionPtr a_, b_;
};

void ExpectNear(const at::Tensor& actual, const at::Tensor& expected,
                double scale) {
  EXPECT_LE(MaxAbs(actual.to(at::kDouble) - expected.to(at::kDouble)),
            Tolerance(kEpsilonF32, kPath, std::max(1.0, scale)));
}

// Results of autograd in f64: the log-probability of every target, and
// dLoss/d(normed hidden row) for weighted cross-entropy.
struct HeadReference {
  at::Tensor logprobs_T;
  at::Tensor dy_TH;
};

HeadReference RunHead(const at::Tensor& y_TH, const at::Tensor& head_VH,
                      const std::vector<TrainPiece>& pieces) {
  std::vector<int64_t> targets;
  std::vector<float> weights, temperatures;
  for (const TrainPiece& piece : pieces) {
    for (const Datum& datum : piece.request->data) {
      targets.insert(targets.end(), datum.targets.begin(), datum.targets.end());
      weights.insert(weights.end(), datum.weights.begin(), datum.weights.end());
      temperatures.resize(targets.size(),
                          static_cast<float>(piece.request->loss.temperature));
    }
  }
  const at::Tensor leaf = y_TH.clone().requires_grad_(true);
  const at::Tensor logits = at::mm(leaf, head_VH.to(at::kDouble).t()) /
                            at::tensor(temperatures).unsqueeze(1);
  const at::Tensor logprobs =
      logits.log_softmax(1)
          .gather(1, at::tensor(targets, at::kLong).unsqueeze(1))
          .squeeze(1);
  const at::Tensor loss = -(logprobs * at::tensor(weights)).sum();
  return {.logprobs_T = logprobs.detach(),
          .dy_TH = torch::autograd::grad({loss}, {leaf})[0]};
}

TEST_F(TrainRunnerTest, MatchesAutogradOfTheWholeStep) {
  const TrainRequest first = Request({MakeDatum(1, 9), MakeDatum(2, 1)});
  const TrainRequest second = Request({MakeDatum(3, 6)}, 0.7);
  const TrainRequest third = Request({MakeDatum(4, 12)}, 1.5);
  const std::vector<TrainPiece> pieces = {Piece(first, a_), Piece(second, a_),
                                          Piece(third, b_)};
  const Outcome actual = Run(pieces);

  const model::PackedBatch batch =
      PackTrain(pieces, /*share_prompts=*/false).batch;
  const auto reference = [&](const at::Tensor& dy_TH) {
    return RunReference(decoder_.config(), decoder_.weights(), batch, dy_TH);
  };
  const at::Tensor y =
      reference(at::zeros({batch.tokens_T.numel(), 24}, at::kDouble)).y_TH;
  const HeadReference head = RunHead(y, decoder_.weights().head_VH, pieces);
  const ReferenceResult expected = reference(head.dy_TH);

  int64_t row = 0;
  size_t d = 0;
  for (const TrainPiece& piece : pieces) {
    for (const Datum& datum : piece.request->data) {
      const DatumResult& result = actual.data[d++];
      for (size_t i = 0; i < datum.targets.size(); ++i, ++row) {
        const bool scored = datum.weights[i] != 0;
        const double lp = head.logprobs_T[row].item<double>();
        const double tolerance = Tolerance(kEpsilonF32, kPath, 10);
        EXPECT_NEAR(result.logprobs[i], scored ? lp : 0, tolerance);
        EXPECT_NEAR(result.losses[i], -datum.weights[i] * lp, tolerance);
      }
    }
  }
  EXPECT_EQ(d, actual.data.size());
  ExpectNear(actual.Gradient(a_), expected.gradients[0],
             MaxAbs(expected.gradients[0]));
  ExpectNear(actual.Gradient(b_), expected.gradients[1],
             MaxAbs(expected.gradients[1]));
}

TEST_F(TrainRunnerTest, GivesTheSameBitsAgain) {
  const TrainRequest request = Request({MakeDatum(1, 9), MakeDatum(2, 7)});
  const Outcome once = Run({Piece(request, a_)});
  const Outcome twice = Run({Piece(request, a_)});
  EXPECT_TRUE(at::equal(once.Gradient(a_), twice.Gradient(a_)));
  EXPECT_EQ(once.data[1].logprobs, twice.data[1].logprobs);
}

TEST_F(TrainRunnerTest, ForwardAloneGivesTheSameNumbers) {
  const TrainRequest request = Request({MakeDatum(1, 9), MakeDatum(2, 7)});
  const Outcome with = Run({Piece(request, a_)});
  const Outcome without = Run({Piece(request, a_)}, /*gradients=*/nullptr);
  for (size_t d = 0; d < 2; ++d) {
    EXPECT_EQ(with.data[d].logprobs, without.data[d].logprobs);
    EXPECT_EQ(with.data[d].losses, without.data[d].losses);
  }
  EXPECT_GT(MaxAbs(with.Gradient(a_)), 0);
}

TEST_F(TrainRunnerTest, TrainsOnlyTheVersionsThatItIsGivenGradientsOf) {
  const TrainRequest first = Request({MakeDatum(1, 9)});
  const TrainRequest second = Request({MakeDatum(2, 7)});
  const std::vector<TrainPiece> pieces = {Piece(first, a_), Piece(second, b_)};
  const lora::LoraGradients of_b = lora::ZeroGradients({b_}, at::kCPU);
  const Outcome both = Run(pieces), one = Run(pieces, &of_b);
  EXPECT_EQ(one.data[0].logprobs, both.data[0].logprobs);
  EXPECT_TRUE(at::equal(one.Gradient(b_), both.Gradient(b_)));
}

TEST_F(TrainRunnerTest, SlicesOfARequestAddUpToTheWhole) {
  const TrainRequest request =
      Request({MakeDatum(1, 9), MakeDatum(2, 7), MakeDatum(3, 4)});
  const Outcome at_once = Run({Piece(request, a_)});
  TrainPiece slice = Piece(request, a_);
  slice.num_data = 1;
  const Outcome start = Run({slice});
  slice.first_datum = 1;
  slice.num_data = 2;
  const Outcome rest = Run({slice}, &start.gradients);
  ExpectNear(rest.Gradient(a_), at_once.Gradient(a_),
             MaxAbs(at_once.Gradient(a_)));
  ASSERT_EQ(rest.data.size(), 2u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(rest.data[1].logprobs[i], at_once.data[2].logprobs[i],
                Tolerance(kEpsilonF32, kPath, 10));
  }
}

// There are more rows than one slice of the final norm's gradient takes.
TEST_F(TrainRunnerTest, ManyScoredRowsAreTheSumOfTheirParts) {
  std::vector<Datum> data;
  for (int32_t i = 0; i < 18; ++i) data.push_back(MakeDatum(i, 120));
  const TrainRequest request = Request(std::move(data));
  const at::Tensor whole_N = Run({Piece(request, a_)}).Gradient(a_);
  const lora::LoraGradients sum = lora::ZeroGradients({a_}, at::kCPU);
  TrainPiece part = Piece(request, a_);
  part.num_data = 1;
  for (; part.first_datum < 18; ++part.first_datum) (void)Run({part}, &sum);
  ExpectNear(sum[0].gradient_N, whole_N, MaxAbs(whole_N));
}

TEST_F(TrainRunnerTest, KeepsNanOfOneAdapterFromTheOthers) {
  const TrainRequest request = Request({MakeDatum(1, 9)});
  auto bad = std::make_shared<lora::AdapterVersion>(*b_);
  bad->compute_N = at::full_like(bad->compute_N, NAN);
  const Outcome before = Run({Piece(request, a_), Piece(request, b_)});
  const Outcome after = Run({Piece(request, a_), Piece(request, bad)});
  EXPECT_TRUE(std::isnan(after.data[1].losses[0]));
  EXPECT_EQ(before.data[0].logprobs, after.data[0].logprobs);
  EXPECT_TRUE(at::equal(before.Gradient(a_), after.Gradient(a_)));
}

TEST_F(TrainRunnerTest, GivesEntropiesToThoseWhoAsk) {
  TrainRequest asks = Request({MakeDatum(1, 6)});
  asks.loss.return_entropy = true;
  const TrainRequest silent = Request({MakeDatum(2, 5)});
  const Outcome outcome = Run({Piece(silent, a_), Piece(asks, b_)});
  EXPECT_THAT(outcome.data[0].entropies, IsEmpty());
  const std::vector<float>& entropies = outcome.data[1].entropies;
  ASSERT_EQ(entropies.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    if (i % 3 == 1) {
      EXPECT_EQ(entropies[i], 0.0f);
    } else {
      EXPECT_GT(entropies[i], 0.0f);
      EXPECT_LT(entropies[i], std::log(53.0));
    }
  }
}

// The tokens have zero, one or three targets. In the dense form, each row is
// padded with targets of weight 0.
TEST_F(TrainRunnerTest, RaggedTargetsAreThoseOfPaddedRows) {
  constexpr int kWidth = 3;
  // `ragged` and `dense` have the tokens of `other`, so each shares rows with
  // `other`.
  const Datum other = MakeDatum(3, kMinSavedRows + 4);
  Datum ragged{.tokens = other.tokens, .target_offsets = {0}};
  Datum dense{.tokens = other.tokens, .targets_per_token = kWidth};
  for (size_t i = 0; i < other.tokens.size(); ++i) {
    const int count = std::array{1, 0, 3, 3}[i % 4];
    for (int k = 0; k < kWidth; ++k) {
      const auto target = static_cast<int32_t>((7 * i + 11 * k) % 53);
      const float weight = 0.75F - 0.5F * static_cast<float>(k);
      dense.targets.push_back(target);
      dense.weights.push_back(k < count ? weight : 0.0F);
      if (k >= count) continue;
      ragged.targets.push_back(target);
      ragged.weights.push_back(weight);
    }
    ragged.target_offsets.push_back(
        static_cast<uint32_t>(ragged.targets.size()));
  }
  const auto request = [&other](const Datum& datum) {
    TrainRequest result = Request({other, datum}, 0.7);
    result.loss.return_entropy = true;
    return result;
  };
  const TrainRequest ragged_request = request(ragged);
  const TrainRequest dense_request = request(dense);
  const Outcome actual = Run({Piece(ragged_request, a_)});
  const Outcome expected = Run({Piece(dense_request, a_)});

  ASSERT_EQ(actual.data[1].logprobs.size(), ragged.targets.size());
  for (int64_t i = 0; i < ragged.num_tokens(); ++i) {
    const TargetSpan own = ragged.targets_of(i);
    const int64_t padded = dense.targets_of(i).begin;
    for (int64_t t = own.begin; t < own.end; ++t) {
      const int64_t same = padded + t - own.begin;
      EXPECT_EQ(actual.data[1].logprobs[t], expected.data[1].logprobs[same]);
      EXPECT_EQ(actual.data[1].losses[t], expected.data[1].losses[same]);
    }
  }
  EXPECT_EQ(actual.data[1].entropies, expected.data[1].entropies);
  EXPECT_EQ(actual.data[1].entropies[1], 0.0F);
  EXPECT_EQ(actual.metrics[0].Metrics(), expected.metrics[0].Metrics());
  EXPECT_GT(MaxAbs(actual.Gradient(a_)), 0);
  EXPECT_TRUE(at::equal(actual.Gradient(a_), expected.Gradient(a_)));
}

TEST_F(TrainRunnerTest, SumsTheMetricsOfEachPieceApart) {
  const TrainRequest first = Request({MakeDatum(1, 9), MakeDatum(5, 3)});
  const TrainRequest second = Request({MakeDatum(2, 7)});
  const Outcome outcome = Run({Piece(first, a_), Piece(second, b_)});
  const auto sum = [&](size_t d) {
    const std::vector<float>& losses = outcome.data[d].losses;
    return std::accumulate(losses.begin(), losses.end(), 0.0);
  };
  EXPECT_NEAR(outcome.metrics[0].Metrics().at("loss:sum"), sum(0) + sum(1),
              Tolerance(kEpsilonF32, 12, sum(0) + sum(1)));
  EXPECT_NEAR(outcome.metrics[1].Metrics().at("loss:sum"), sum(2),
              Tolerance(kEpsilonF32, 12, sum(2)));
}

TEST_F(TrainRunnerTest, DataThatScoreNothingLeaveTheGradientAlone) {
  Datum silent = MakeDatum(1, 4);
  silent.weights.assign(4, 0.0f);
  const TrainRequest request = Request({silent});
  const Outcome outcome = Run({Piece(request, a_)});
  EXPECT_THAT(outcome.data[0].logprobs, Each(0.0f));
  EXPECT_EQ(MaxAbs(outcome.Gradient(a_)), 0);
}

}  // namespace
}  // namespace weft::engine::train_runner_test
