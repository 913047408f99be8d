// Compares samples of requests that change logits with the options' formulas in
// f64 on the model's own logits.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "src/engine/decode/sample_loop.h"
#include "tests/engine/decode/sample_loop_fixture.h"
#include "tests/support/tolerance.h"

namespace weft::engine {
namespace {

using ::testing::Each;
using ::testing::SizeIs;

constexpr int64_t kVocab = 53;

// Returns the log-probabilities from which a sample with the tokens `drawn`
// draws its next token.
std::vector<double> Expected(const at::Tensor& logits_V,
                             const SampleRequest& request,
                             const std::vector<int32_t>& drawn) {
  const SamplingConfig& config = request.config;
  std::vector<double> x;
  for (int64_t i = 0; i < kVocab; ++i) x.push_back(logits_V[i].item<float>());
  for (const auto& [token, bias] : config.logit_bias) x[token] += bias;
  for (int32_t i = 0; i < kVocab; ++i) {
    const auto count = std::ranges::count(drawn, i);
    if (count > 0 || std::ranges::count(request.prompt, i) > 0) {
      x[i] = x[i] > 0 ? x[i] / config.repetition_penalty
                      : x[i] * config.repetition_penalty;
    }
    if (count > 0) x[i] -= config.presence_penalty;
    x[i] -= config.frequency_penalty * static_cast<double>(count);
    const bool allowed = config.allowed_token_ids.empty() ||
                         std::ranges::count(config.allowed_token_ids, i) > 0;
    const bool early = static_cast<int>(drawn.size()) < config.min_tokens;
    if (!allowed ||
        (early && std::ranges::count(config.stop.token_ids, i) > 0)) {
      x[i] = -std::numeric_limits<double>::infinity();
    }
  }
  const double t = config.temperature == 0 ? 1 : config.temperature;
  double sum = 0;
  for (double& value : x) sum += std::exp(value /= t);
  for (double& value : x) value -= std::log(sum);
  return x;
}

// A request with every option that changes logits.
SampleRequest ManyOptions(int32_t first, int length, int max_tokens,
                          uint64_t seed) {
  SampleRequest request = Request(first, length, max_tokens, seed);
  SamplingConfig& config = request.config;
  config.repetition_penalty = 1.3F;
  config.presence_penalty = 0.5F;
  config.frequency_penalty = 0.25F;
  config.logit_bias = {{40, 1.5F}, {request.prompt[0], -2.0F}, {7, 3.0F}};
  for (int32_t i = 0; i < kVocab; i += i % 3 + 1) {
    config.allowed_token_ids.push_back(i);
  }
  config.stop.token_ids = {7, 40};
  config.min_tokens = max_tokens / 2;
  return request;
}

class SampleOptionsTest : public SampleLoopTest {
 protected:
  // Checks the logprobs of a sample and, with temperature 0, its tokens.
  void Check(const SampleRequest& request, const Sample& sample,
             const lora::AdapterVersionPtr& version) {
    std::vector<int32_t> tokens = request.prompt, drawn;
    for (size_t i = 0; i < sample.tokens.size(); ++i) {
      const std::vector<double> expected =
          Expected(NextLogits(decoder_, tokens, version), request, drawn);
      // Penalties and temperature enlarge the rounding of logits by at most 10.
      const double tolerance = Tolerance(kEpsilonF32, 1000, 10) * 10;
      EXPECT_NEAR(sample.logprobs[i], expected[sample.tokens[i]], tolerance);
      const double best = *std::ranges::max_element(expected);
      if (request.config.temperature == 0) {
        EXPECT_NEAR(expected[sample.tokens[i]], best, tolerance);
      }
      if (request.top_logprobs > 0) {
        for (const auto& [token, logprob] : sample.top_logprobs[i]) {
          EXPECT_NEAR(logprob, expected[token], tolerance);
        }
        EXPECT_NEAR(sample.top_logprobs[i][0].second, best, tolerance);
      }
      tokens.push_back(sample.tokens[i]);
      drawn.push_back(sample.tokens[i]);
    }
  }
};

TEST_F(SampleOptionsTest, LogprobsAreThoseOfTheChangedDistribution) {
  for (const lora::AdapterVersionPtr& version :
       {lora::AdapterVersionPtr(), adapter_}) {
    for (const double temperature : {0.0, 0.7, 1.0}) {
      SampleRequest request = ManyOptions(3, 11, 20, 5);
      request.config.temperature = temperature;
      request.top_logprobs = 3;
      request.num_samples = 2;
      const SampleResult result = Alone(request, version);
      ASSERT_THAT(result.samples, SizeIs(2));
      for (const Sample& sample : result.samples) {
        EXPECT_GE(sample.tokens.size(), 11);
        Check(request, sample, version);
      }
    }
  }
}

// Each option alone, so that no other option hides its lack.
TEST_F(SampleOptionsTest, EachOptionChangesTheDistribution) {
  const SampleRequest plain = Request(3, 11, 12, 5);
  const SampleResult unchanged = Alone(plain);
  const SampleRequest all = ManyOptions(3, 11, 12, 5);
  std::vector<SampleRequest> requests(5, plain);
  requests[0].config.repetition_penalty = 1.3F;
  requests[1].config.presence_penalty = 2;
  requests[2].config.frequency_penalty = -2;
  requests[3].config.logit_bias = all.config.logit_bias;
  requests[4].config.allowed_token_ids = all.config.allowed_token_ids;
  for (const SampleRequest& request : requests) {
    const SampleResult result = Alone(request);
    Check(request, result.samples[0], nullptr);
    EXPECT_NE(result.samples[0].logprobs, unchanged.samples[0].logprobs);
  }
}

TEST_F(SampleOptionsTest, NoSampleStopsBeforeMinTokens) {
  SampleRequest request = Request(3, 11, 30, 5);
  request.config.temperature = 50;  // Draws every token now and then.
  for (int32_t i = 1; i < kVocab; i += 2) {
    request.config.stop.token_ids.push_back(i);
  }
  const SampleResult short_one = Alone(request);
  EXPECT_LT(short_one.samples[0].tokens.size(), 12);
  request.config.min_tokens = 12;
  Sample sample = Alone(request).samples[0];
  ASSERT_GT(sample.tokens.size(), 12);
  EXPECT_EQ(sample.finish_reason, FinishReason::kStop);
  for (size_t i = 0; i + 1 < sample.tokens.size(); ++i) {
    EXPECT_EQ(sample.tokens[i] % 2, 0) << i;
  }
  Check(request, sample, nullptr);
  // A stop sequence of one token is drawn, but does not end the sample.
  request.config.stop.token_ids = {};
  for (int32_t i = 1; i < kVocab; i += 2) {
    request.config.stop.token_sequences.push_back({i});
  }
  sample = Alone(request).samples[0];
  ASSERT_GT(sample.tokens.size(), 12);
  EXPECT_TRUE(std::ranges::any_of(sample.tokens.begin(),
                                  sample.tokens.begin() + 12,
                                  [](int32_t t) { return t % 2 == 1; }));
  EXPECT_EQ(sample.tokens.back() % 2, 1);
}

TEST_F(SampleOptionsTest, OneAllowedTokenIsDrawnWithCertainty) {
  SampleRequest request = Request(3, 11, 4, 5);
  request.config.allowed_token_ids = {9};
  request.config.min_p = 1;
  const Sample sample = Alone(request).samples[0];
  EXPECT_THAT(sample.tokens, Each(9));
  EXPECT_THAT(sample.logprobs, Each(0));
}

TEST_F(SampleOptionsTest, CompanyAndPreemptionChangeNoDraw) {
  const SampleRequest requests[] = {ManyOptions(1, 4, 100, 7),
                                    Request(20, 17, 90, 8),
                                    ManyOptions(33, 30, 80, 9)};
  std::vector<SampleResult> expected;
  for (const SampleRequest& request : requests) {
    expected.push_back(Alone(request));
  }
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, /*pages=*/9)});
  const double before = Metric("weft_sample_preemptions_total");
  for (int i = 0; i < 3; ++i) Admit(i, requests[i]);
  const std::map<uint64_t, SampleResult> results = Finish();
  for (int i = 0; i < 3; ++i) ExpectSameDraws(results.at(i), expected[i]);
  EXPECT_GT(Metric("weft_sample_preemptions_total"), before);
}

TEST_F(SampleOptionsTest, AStreamHasTheSameTokens) {
  const SampleRequest request = ManyOptions(3, 11, 20, 5);
  const Sample expected = Alone(request).samples[0];
  Admit(1, request, nullptr, /*streams=*/true);
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  while (loop_->active() > 0) {
    for (const SampleEvent& event : loop_->Step()) {
      for (const SampleDelta& delta : event.deltas) {
        tokens.push_back(delta.piece.tokens.at(0));
        logprobs.push_back(delta.piece.logprobs.at(0));
      }
    }
  }
  EXPECT_EQ(tokens, expected.tokens);
  EXPECT_EQ(logprobs, expected.logprobs);
}

}  // namespace
}  // namespace weft::engine
