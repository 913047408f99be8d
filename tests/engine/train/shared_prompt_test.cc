// Tests that shared prompts and recomputed layers do not change a step.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/engine/train/train_runner.h"
#include "tests/engine/train/group_data.h"
#include "tests/engine/train/step_pieces.h"
#include "tests/model/tiny_model.h"

namespace weft::engine::shared_prompt_test {
namespace {

using ::testing::HasSubstr;
using ::weft::testing::ExpectGradientsNear;
using ::weft::testing::Group;
using ::weft::testing::Join;
using ::weft::testing::MakeDatum;
using ::weft::testing::PiecesOf;
using ::weft::testing::Tokens;

// Steps with shared and with repeated prompts differ by at most this relative
// difference.
constexpr double kPromised = 1e-5;

struct Step {
  std::vector<DatumResult> data;
  lora::LoraGradients gradients;  // One per request.
  int64_t num_rows = 0;
};

class SharedPromptTest : public ::testing::Test {
 protected:
  SharedPromptTest()
      : decoder_(TinyDecoder(at::kFloat, /*seed=*/41)),
        executor_(decoder_, {}, {}) {
    for (const int rank : {3, 4}) {
      versions_.push_back(TinyVersion(decoder_.config(),
                                      {.rank = rank, .alpha = 6}, at::kFloat));
    }
  }

  // Request i trains adapter i.
  Step Train(const std::vector<TrainRequest>& requests,
             const TrainRunnerOptions& options) {
    auto [pieces, gradients] = PiecesOf(requests, versions_);
    const std::vector<loss::MetricSums> metrics(requests.size());
    Step step;
    step.gradients = gradients;
    TrainRunner runner(&executor_, options);
    step.data = runner.Run(pieces, &gradients, metrics).value().data;
    step.num_rows =
        PackTrain(pieces, options.share_prompts).batch.tokens_T.numel();
    return step;
  }

  // Checks that a step with shared prompts equals the step with repeated
  // prompts, with and without recomputation. Returns the number of rows with
  // shared prompts, and the number with repeated prompts.
  std::pair<int64_t, int64_t> ExpectSame(
      const std::vector<TrainRequest>& requests) {
    const Step repeated = Train(
        requests,
        {.share_prompts = false, .checkpointing = GradientCheckpointing::kOff});
    int64_t shared_rows = 0;
    for (const GradientCheckpointing checkpointing :
         {GradientCheckpointing::kOff, GradientCheckpointing::kAll}) {
      const Step shared = Train(
          requests, {.share_prompts = true, .checkpointing = checkpointing});
      shared_rows = shared.num_rows;
      ExpectClose(shared, repeated);
    }
    return {shared_rows, repeated.num_rows};
  }

  // This model's logits reach tens, so values above 1 are compared relatively.
  static void ExpectNear(float actual, float expected) {
    EXPECT_NEAR(actual, expected,
                kPromised * std::max(1.0F, std::abs(expected)));
  }

  static void ExpectClose(const Step& actual, const Step& expected) {
    ASSERT_EQ(actual.data.size(), expected.data.size());
    for (size_t d = 0; d < actual.data.size(); ++d) {
      const DatumResult& a = actual.data[d];
      const DatumResult& e = expected.data[d];
      ASSERT_EQ(a.logprobs.size(), e.logprobs.size());
      for (size_t i = 0; i < a.logprobs.size(); ++i) {
        ExpectNear(a.logprobs[i], e.logprobs[i]);
        ExpectNear(a.losses[i], e.losses[i]);
      }
    }
    ExpectGradientsNear(actual.gradients, expected.gradients, kPromised);
  }

  const model::Decoder decoder_;
  executor::Executor executor_;
  std::vector<lora::AdapterVersionPtr> versions_;
};

class GroupTest
    : public SharedPromptTest,
      public ::testing::WithParamInterface<std::tuple<int, int, int>> {};

TEST_P(GroupTest, IsTheRepeatedStep) {
  const auto [size, prompt, completion] = GetParam();
  ExpectSame({{.data = Group(size, prompt, completion)}});
}

std::string GroupName(
    const ::testing::TestParamInfo<GroupTest::ParamType>& test) {
  const auto& [size, prompt, completion] = test.param;
  return absl::StrCat("Size", size, "_Prompt", prompt, "_Completion",
                      completion);
}

INSTANTIATE_TEST_SUITE_P(SizesPromptsCompletions, GroupTest,
                         ::testing::Combine(::testing::Values(1, 2, 8, 16),
                                            ::testing::Values(1, 20, 40),
                                            ::testing::Values(1, 9)),
                         GroupName);

TEST_F(SharedPromptTest, RunsThePromptOnce) {
  EXPECT_EQ(ExpectSame({{.data = Group(8, 20, 6)}}),
            std::pair(int64_t{20 + 8 * 6}, int64_t{8 * 26}));
}

TEST_F(SharedPromptTest, NestedPrefixes) {
  const std::vector<int32_t> system = Tokens(3, 20);
  std::vector<Datum> data;
  for (int question = 0; question < 3; ++question) {
    const std::vector<int32_t> prompt = Join(system, Tokens(17 + question, 18));
    for (int g = 0; g < 3; ++g) {
      data.push_back(
          MakeDatum(Join(prompt, Tokens(29 + g, 2 + g)), question + g));
    }
    data.push_back(MakeDatum(prompt, question));  // This datum ends with the
                                                  // prompt.
  }
  const auto [shared, repeated] = ExpectSame({{.data = std::move(data)}});
  EXPECT_EQ(shared, 20 + 3 * (18 + 2 + 3 + 4));
  EXPECT_EQ(repeated, 3 * (4 * 38 + 9));
}

TEST_F(SharedPromptTest, EqualPromptsOfTwoAdaptersAreNotShared) {
  const auto [shared, repeated] =
      ExpectSame({{.data = Group(1, 30, 5)}, {.data = Group(1, 30, 5)}});
  EXPECT_EQ(shared, repeated);
}

TEST_F(SharedPromptTest, MixedAdaptersShareEachItsOwn) {
  const auto [shared, repeated] =
      ExpectSame({{.loss = {.temperature = 0.7}, .data = Group(4, 30, 5)},
                  {.data = Group(3, 30, 2)}});
  EXPECT_EQ(shared, 30 + 4 * 5 + 30 + 3 * 2);
  EXPECT_EQ(repeated, 4 * 35 + 3 * 32);
}

TEST_F(SharedPromptTest, ABatchThatCannotFitChangesNothing) {
  const TrainRequest request = {.data = Group(2, 20, 6)};
  const TrainPiece piece = {
      .request = &request, .num_data = 2, .version = versions_[0]};
  const lora::LoraGradients gradients =
      lora::ZeroGradients({versions_[0]}, at::kCPU);
  TrainRunner runner(&executor_, {.memory_budget_bytes = 1000});
  const absl::Status status = runner.Run({piece}, &gradients, {{}}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("there are 1000"));
  EXPECT_EQ(gradients[0].gradient_N.abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace weft::engine::shared_prompt_test
