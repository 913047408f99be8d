// Tests the whole step in f64, where rounding cannot hide a wrong formula. The
// gradient must be the loss's slope, and sharing or recomputing must change
// nothing.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/engine/train/batch_packer.h"
#include "src/loss/fused_head.h"
#include "src/model/decoder.h"
#include "tests/engine/train/group_data.h"
#include "tests/engine/train/step_pieces.h"
#include "tests/model/tiny_model.h"

namespace weft::engine::exact_step_test {
namespace {

using ::weft::testing::ExpectGradientsNear;
using ::weft::testing::Group;
using ::weft::testing::Join;
using ::weft::testing::MakeDatum;
using ::weft::testing::PiecesOf;
using ::weft::testing::Tokens;

// In f64, steps with shared and with repeated prompts differ by at most this
// relative difference.
constexpr double kPromised = 1e-10;
constexpr double kSoftcap = 9;

struct Settings {
  bool share_prompts = false;
  int num_recomputed = 0;
};

struct Step {
  double loss = 0;
  std::vector<at::Tensor> logprobs;  // For each datum, the log-probabilities of
                                     // its scored targets.
  lora::LoraGradients gradients;     // One for each adapter.
};

class ExactStepTest : public ::testing::Test {
 protected:
  ExactStepTest() : decoder_(TinyDecoder(at::kDouble, /*seed=*/43)) {
    LoraConfig config{.rank = 3, .alpha = 6};
    config.target_modules.push_back(TargetModule::kLmHead);
    config.target_modules.push_back(TargetModule::kEmbedTokens);
    config.overrides = {{0, TargetModule::kQProj, {.rank = 2, .alpha = 3}},
                        {1, TargetModule::kUpProj, {}}};
    versions_.push_back(TinyVersion(decoder_.config(), config, at::kDouble));
    config.rank = 4;
    versions_.push_back(TinyVersion(decoder_.config(), config, at::kDouble));
  }

  // Request i runs with adapter i. The weighted cross-entropy is never rounded
  // to f32.
  Step Run(const std::vector<TrainRequest>& requests,
           const Settings& settings) const {
    const at::InferenceMode no_autograd;
    Step step;
    auto [pieces, gradients] = PiecesOf(requests, versions_);
    step.gradients = gradients;
    const PackedTrain packed = PackTrain(pieces, settings.share_prompts);
    model::Tape tape;
    const at::Tensor x_TH =
        decoder_.ForwardLayers(model::Mode::kTrain, packed.batch, &tape,
                               settings.num_recomputed, /*kv=*/nullptr);
    const at::Tensor x_RH = x_TH.index_select(0, packed.score_index_R);
    const at::Tensor normed_RH = decoder_.FinalNorm(x_RH);
    const at::Tensor& head_VH = decoder_.weights().head_VH;
    const loss::HeadOptions options{.chunk_rows = 7, .softcap = kSoftcap};
    const loss::HeadResult scores =
        loss::ScoreHead(normed_RH, head_VH, packed.rows, options,
                        /*want_gradient=*/true, /*want_entropy=*/false);
    const at::Tensor g_E = at::zeros_like(scores.logprobs_E);
    for (const PackedDatum& datum : packed.data) {
      std::vector<float> weights;
      for (const float weight : datum.datum->weights) {
        if (weight != 0) weights.push_back(weight);
      }
      const at::Tensor entries = at::tensor(datum.entries, at::kLong);
      const at::Tensor weights_E = at::tensor(weights).to(at::kDouble);
      step.logprobs.push_back(scores.logprobs_E.index_select(0, entries));
      step.loss -= (weights_E * step.logprobs.back()).sum().item<double>();
      g_E.index_put_({entries}, -weights_E);
    }
    at::Tensor d_TH = at::zeros_like(x_TH);
    d_TH.index_add_(
        0, packed.score_index_R,
        decoder_.FinalNormBackward(
            loss::HeadBackward(scores, normed_RH, head_VH, packed.rows, options,
                               g_E, gradients),
            x_RH));
    decoder_.BackwardLayers(packed.batch, tape, std::move(d_TH), gradients);
    return step;
  }

  void ExpectSharingChangesNothing(
      const std::vector<TrainRequest>& requests) const {
    const Step expected = Run(requests, {});
    for (const int recomputed : {0, 1, decoder_.config().num_layers}) {
      const Step actual =
          Run(requests, {.share_prompts = true, .num_recomputed = recomputed});
      for (size_t d = 0; d < expected.logprobs.size(); ++d) {
        ExpectClose(actual.logprobs[d], expected.logprobs[d]);
      }
      ExpectGradientsNear(actual.gradients, expected.gradients, kPromised);
    }
  }

  static void ExpectClose(const at::Tensor& actual,
                          const at::Tensor& expected) {
    EXPECT_LE((actual - expected).norm().item<double>(),
              kPromised * expected.norm().item<double>());
  }

  const model::Decoder decoder_;
  std::vector<lora::AdapterVersionPtr> versions_;
};

class ExactGroupTest
    : public ExactStepTest,
      public ::testing::WithParamInterface<std::tuple<int, int>> {};

TEST_P(ExactGroupTest, SharedIsRepeated) {
  const auto [size, prompt] = GetParam();
  for (const int completion : {1, 9}) {
    ExpectSharingChangesNothing({{.data = Group(size, prompt, completion)}});
  }
}

std::string GroupName(
    const ::testing::TestParamInfo<ExactGroupTest::ParamType>& test) {
  const auto& [size, prompt] = test.param;
  return absl::StrCat("Size", size, "_Prompt", prompt);
}

INSTANTIATE_TEST_SUITE_P(SizesPrompts, ExactGroupTest,
                         ::testing::Combine(::testing::Values(1, 2, 8, 16),
                                            ::testing::Values(1, 20, 40)),
                         GroupName);

TEST_F(ExactStepTest, NestedPrefixesAndTwoAdapters) {
  const std::vector<int32_t> system = Tokens(3, 20);
  std::vector<Datum> nested;
  for (int question = 0; question < 3; ++question) {
    const std::vector<int32_t> prompt = Join(system, Tokens(17 + question, 18));
    for (int g = 0; g < 3; ++g) {
      nested.push_back(
          MakeDatum(Join(prompt, Tokens(29 + g, 2 + g)), question + g));
    }
  }
  ExpectSharingChangesNothing(
      {{.loss = {.temperature = 0.7}, .data = std::move(nested)},
       {.data = Group(4, 20, 5)}});
}

// Extrapolates central differences of steps h and h / 2, which leaves an error
// of h^4.
TEST_F(ExactStepTest, TheGradientIsTheSlopeOfTheLoss) {
  constexpr double kStep = 1e-3;
  constexpr double kTolerance = 1e-9;
  const std::vector<TrainRequest> requests = {
      {.loss = {.temperature = 1.3}, .data = Group(3, 20, 6)},
      {.data = Group(2, 4, 9)}};
  const Settings settings{.share_prompts = true, .num_recomputed = 1};
  at::manual_seed(44);
  std::vector<at::Tensor> directions;
  double expected = 0;
  const Step step = Run(requests, settings);
  for (size_t i = 0; i < versions_.size(); ++i) {
    directions.push_back(at::randn_like(versions_[i]->compute_N));
    directions.back() /= directions.back().norm();
    expected += step.gradients[i].gradient_N.dot(directions[i]).item<double>();
  }
  const std::vector<lora::AdapterVersionPtr> center = versions_;
  const auto loss_at = [&](double distance) {
    for (size_t i = 0; i < center.size(); ++i) {
      auto moved = std::make_shared<lora::AdapterVersion>(*center[i]);
      moved->compute_N = center[i]->compute_N + distance * directions[i];
      versions_[i] = std::move(moved);
    }
    return Run(requests, settings).loss;
  };
  const auto slope = [&](double h) {
    return (loss_at(h) - loss_at(-h)) / (2 * h);
  };
  const double measured = (4 * slope(kStep / 2) - slope(kStep)) / 3;
  EXPECT_GT(std::abs(expected), 1e-3 * std::abs(step.loss));
  EXPECT_NEAR(measured, expected, kTolerance * std::abs(step.loss));
}

}  // namespace
}  // namespace weft::engine::exact_step_test
