// Tests what the sampling loop returns of a prompt: scores of given tokens,
// draws at each position, and scores of the last tokens only.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/engine/decode/sample_loop.h"
#include "tests/engine/decode/sample_loop_fixture.h"

namespace weft::engine {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class PromptScoresTest : public SampleLoopTest {
 protected:
  // Returns the logits [V] for each position of the prompt but the first, each
  // computed by a pass of its own.
  std::vector<at::Tensor> Logits(const SampleRequest& request,
                                 const lora::AdapterVersionPtr& version) const {
    const at::InferenceMode no_autograd;
    std::vector<at::Tensor> rows;
    for (size_t i = 1; i < request.prompt.size(); ++i) {
      rows.push_back(
          NextLogits(decoder_,
                     {request.prompt.begin(),
                      request.prompt.begin() + static_cast<std::ptrdiff_t>(i)},
                     version));
    }
    return rows;
  }
};

// Asks for i % 3 tokens at the place of token i + 1.
void AskForTargets(SampleRequest& request) {
  request.prompt_target_offsets = {0};
  for (size_t i = 0; i + 1 < request.prompt.size(); ++i) {
    for (size_t j = 0; j < i % 3; ++j) {
      request.prompt_targets.push_back(j == 0 ? request.prompt[i + 1]
                                              : static_cast<int32_t>(i % 53));
    }
    request.prompt_target_offsets.push_back(
        static_cast<int64_t>(request.prompt_targets.size()));
  }
}

TEST_F(PromptScoresTest, TargetsGetTheLogprobsOfTheirPositions) {
  for (const lora::AdapterVersionPtr& version :
       {lora::AdapterVersionPtr(), adapter_}) {
    SampleRequest request = Request(3, 20, 1, 7);
    AskForTargets(request);
    std::vector<float> expected;
    const std::vector<at::Tensor> logits = Logits(request, version);
    for (size_t i = 0; i < logits.size(); ++i) {
      const at::Tensor logprobs = logits[i].log_softmax(0);
      for (int64_t j = request.prompt_target_offsets[i];
           j < request.prompt_target_offsets[i + 1]; ++j) {
        expected.push_back(
            logprobs[request.prompt_targets[static_cast<size_t>(j)]]
                .item<float>());
      }
    }
    ASSERT_THAT(expected, SizeIs(18));
    for (const bool others : {false, true}) {
      request.prompt_logprobs = others;
      request.prompt_top_logprobs = others ? 2 : 0;
      for (const int64_t piece : {2048, 7, 1}) {
        Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
                 .max_prefill_tokens = piece});
        const SampleResult result = Alone(request, version);
        ExpectSameScores(result.prompt_target_logprobs, expected);
        EXPECT_THAT(result.prompt_logprobs, SizeIs(others ? 20 : 0));
      }
    }
  }
}

// The mean of the logprobs of draws is minus the entropy, and the variance of a
// logprob under its own distribution bounds how far a mean of many may be off.
TEST_F(PromptScoresTest, AlternativesAreDrawnFromTheModel) {
  constexpr int kDraws = 64;
  SampleRequest request = Request(3, 40, 3, 7);
  request.config.temperature = 0.5;
  const SampleResult plain = Alone(request, adapter_);
  request.prompt_alternatives = kDraws;
  const SampleResult result = Alone(request, adapter_);
  ExpectSameDraws(result, plain);
  ASSERT_THAT(result.prompt_alternatives, SizeIs(40));
  EXPECT_THAT(result.prompt_alternatives[0], IsEmpty());
  const std::vector<at::Tensor> logits = Logits(request, adapter_);
  double difference = 0, variance = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const TopLogprobs& row = result.prompt_alternatives[i + 1];
    ASSERT_THAT(row, SizeIs(kDraws));
    const at::Tensor logprobs = (logits[i] / 0.5).log_softmax(0);
    std::vector<float> given, expected;
    for (const auto& [token, logprob] : row) {
      given.push_back(logprob);
      expected.push_back(logprobs[token].item<float>());
      difference += logprob;
    }
    ExpectSameScores(given, expected);
    const at::Tensor p = logprobs.exp();
    const double mean = (p * logprobs).sum().item<double>();
    difference -= kDraws * mean;
    variance +=
        kDraws * ((p * logprobs * logprobs).sum().item<double>() - mean * mean);
  }
  EXPECT_LT(std::abs(difference), 5 * std::sqrt(variance));
  EXPECT_EQ(Alone(request, adapter_).prompt_alternatives[7],
            result.prompt_alternatives[7]);
  request.config.temperature = 0;
  const SampleResult greedy = Alone(request, adapter_);
  for (const auto& [token, logprob] : greedy.prompt_alternatives[7]) {
    EXPECT_EQ(token, logits[6].argmax().item<int32_t>());
  }
}

TEST_F(PromptScoresTest, DrawsOfFewRowsGoInOnePass) {
  const at::InferenceMode no_autograd;
  SampleRequest request = Request(3, 40, 1, 7);
  request.prompt_alternatives = 16;
  const SampleResult whole = Alone(request);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_decode_sequences = 32});
  Admit(1, request);
  (void)loop_->Step();
  EXPECT_EQ(Metric("weft_prompt_tokens_total"), 40 + 2);
  const SampleResult pieces = Finish().at(1);
  ASSERT_THAT(pieces.prompt_alternatives, SizeIs(40));
  ExpectSameDraws(pieces, whole);
}

TEST_F(PromptScoresTest, TargetsCountAgainstTheTokensOfAPass) {
  const at::InferenceMode no_autograd;
  SampleRequest request = Request(3, 40, 1, 7);
  request.prompt_target_offsets = {0};
  for (int i = 1; i < 40; ++i) {
    for (int j = 0; j < 1024; ++j) request.prompt_targets.push_back(j % 53);
    request.prompt_target_offsets.push_back(i * 1024);
  }
  const SampleResult whole = Alone(request);
  for (const int64_t budget : {48, 1}) {
    Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
             .max_prefill_tokens = budget});
    const double before = Metric("weft_prompt_tokens_total");
    Admit(1, request);
    (void)loop_->Step();
    EXPECT_EQ(Metric("weft_prompt_tokens_total") - before,
              budget == 48 ? 3 : 1);
    ExpectSameScores(Finish().at(1).prompt_target_logprobs,
                     whole.prompt_target_logprobs);
  }
}

TEST_F(PromptScoresTest, TheLastTokensNeedOnlyTheirOwnRows) {
  SampleRequest request = Request(3, 40, 4, 7);
  request.prompt_logprobs = true;
  request.prompt_top_logprobs = 2;
  const SampleResult all = Alone(request, adapter_);
  EXPECT_EQ(all.prompt_cached_tokens, 0);
  (void)NewHits();
  request.prompt_logprobs_last_n = 5;
  const SampleResult last = Alone(request, adapter_);
  EXPECT_EQ(NewHits(), 32);
  EXPECT_EQ(last.prompt_cached_tokens, 32);
  ExpectSameDraws(last, all);
  ASSERT_THAT(last.prompt_logprobs, SizeIs(40));
  ASSERT_THAT(last.prompt_top_logprobs, SizeIs(40));
  const auto scored = last.prompt_logprobs.begin() + 35;
  EXPECT_THAT(std::vector<float>(last.prompt_logprobs.begin(), scored),
              Each(0));
  ExpectSameScores(
      {scored, last.prompt_logprobs.end()},
      {all.prompt_logprobs.begin() + 35, all.prompt_logprobs.end()});
  EXPECT_THAT(last.prompt_top_logprobs[34], IsEmpty());
  EXPECT_THAT(last.prompt_top_logprobs[35], SizeIs(2));
  // Targets of a late position need no earlier rows, either.
  SampleRequest late = Request(3, 40, 1, 7);
  late.prompt_targets = {9};
  late.prompt_target_offsets = std::vector<int64_t>(40, 0);
  late.prompt_target_offsets.back() = 1;
  const SampleResult one = Alone(late, adapter_);
  EXPECT_EQ(one.prompt_cached_tokens, 32);
  ExpectSameScores(
      one.prompt_target_logprobs,
      {Logits(late, adapter_).back().log_softmax(0)[9].item<float>()});
}

}  // namespace
}  // namespace weft::engine
