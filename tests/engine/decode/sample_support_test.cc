// Compares the supports of samples, and log-probabilities of the truncated
// distribution, with the filters' formulas in f64 on the model's own logits.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "src/engine/decode/sample_loop.h"
#include "tests/engine/decode/sample_loop_fixture.h"
#include "tests/support/tolerance.h"

namespace weft::engine {
namespace {

constexpr int32_t kVocabulary = 53;

// Returns the probabilities that the filters leave in the distribution from
// which a sample with `num_drawn` tokens draws. Other tokens have 0.
std::vector<double> Truncated(const at::Tensor& logits_V,
                              const SamplingConfig& config, int num_drawn) {
  std::vector<double> p(kVocabulary, 0.0);
  std::vector<int32_t> order(kVocabulary);
  std::iota(order.begin(), order.end(), 0);
  for (const int32_t token : order) {
    const bool allowed =
        config.allowed_token_ids.empty() ||
        std::ranges::count(config.allowed_token_ids, token) > 0;
    const bool early = num_drawn < config.min_tokens &&
                       std::ranges::count(config.stop.token_ids, token) > 0;
    if (!allowed || early) continue;
    p[token] = std::exp(logits_V[token].item<float>() / config.temperature);
  }
  std::ranges::stable_sort(order, std::greater<>(),
                           [&p](int32_t token) { return p[token]; });
  const auto drop_from = [&](size_t first) {
    for (size_t i = first; i < order.size(); ++i) p[order[i]] = 0;
  };
  const auto total = [&p] { return std::accumulate(p.begin(), p.end(), 0.0); };
  if (config.top_k > 0) drop_from(config.top_k);
  const double wanted = config.top_p * total();
  double sum = 0;
  size_t kept = 0;
  while (config.top_p < 1 && kept < order.size() && sum < wanted) {
    sum += p[order[kept++]];
  }
  if (config.top_p < 1) drop_from(kept);
  for (double& x : p) {
    if (x < config.min_p * p[order[0]]) x = 0;
  }
  const double rest = total();
  for (double& x : p) x /= rest;
  return p;
}

std::vector<SampleRequest> Requests() {
  std::vector<SampleRequest> requests(5, Request(3, 11, 20, 5));
  for (SampleRequest& request : requests) {
    request.num_samples = 2;
    request.top_logprobs = 3;
    request.truncated_logprobs = request.return_support = true;
  }
  requests[0].config.top_p = 0.9;
  requests[1].config.top_k = 2;
  requests[2].config.min_p = 0.05;
  requests[2].config.temperature = 0.7;
  requests[3].config.allowed_token_ids = {4, 9, 17, 30, 31, 52};
  requests[3].config.top_p = 0.8;
  requests[4].config.stop.token_ids = {7, 40};
  requests[4].config.min_tokens = 10;
  return requests;
}

class SampleSupportTest : public SampleLoopTest {
 protected:
  void Check(const SampleRequest& request, const Sample& sample,
             const lora::AdapterVersionPtr& version) {
    std::vector<int32_t> tokens = request.prompt;
    ASSERT_EQ(sample.support.offsets.size(), sample.tokens.size() + 1);
    const double tolerance = Tolerance(kEpsilonF32, 1000, 10) * 10;
    for (size_t i = 0; i < sample.tokens.size(); ++i) {
      const std::vector<double> p =
          Truncated(NextLogits(decoder_, tokens, version), request.config,
                    static_cast<int>(i));
      const auto first =
          sample.support.tokens.begin() + sample.support.offsets[i];
      const auto last =
          sample.support.tokens.begin() + sample.support.offsets[i + 1];
      std::vector<int32_t> kept;
      for (int32_t token = 0; token < kVocabulary; ++token) {
        if (p[token] > 0) kept.push_back(token);
      }
      if (kept.size() == kVocabulary) kept.clear();  // The whole vocabulary.
      EXPECT_EQ(std::vector<int32_t>(first, last), kept) << i;
      EXPECT_NEAR(sample.logprobs[i], std::log(p[sample.tokens[i]]), tolerance);
      const size_t num_left = std::ranges::count_if(
          p, [](double probability) { return probability > 0; });
      EXPECT_EQ(sample.top_logprobs[i].size(), std::min<size_t>(3, num_left));
      for (const auto& [token, logprob] : sample.top_logprobs[i]) {
        EXPECT_NEAR(logprob, std::log(p[token]), tolerance);
      }
      tokens.push_back(sample.tokens[i]);
    }
  }
};

TEST_F(SampleSupportTest, IsWhatTheFiltersLeave) {
  for (const SampleRequest& request : Requests()) {
    for (const lora::AdapterVersionPtr& version :
         {lora::AdapterVersionPtr(), adapter_}) {
      const SampleResult result = Alone(request, version);
      ASSERT_EQ(result.samples.size(), 2);
      for (const Sample& sample : result.samples) {
        EXPECT_GE(sample.tokens.size(), 10);
        EXPECT_FALSE(sample.support.tokens.empty());
        Check(request, sample, version);
      }
    }
  }
}

// With filters, draws are the same without supports if no more than 1024 tokens
// are kept. (Without filters, the implied top_k changes the order in which
// probabilities are summed.)
TEST_F(SampleSupportTest, ChangesNoDraw) {
  for (SampleRequest request : Requests()) {
    if (request.config.min_tokens > 0) continue;
    const SampleResult with = Alone(request);
    request.truncated_logprobs = request.return_support = false;
    const SampleResult without = Alone(request);
    for (size_t s = 0; s < with.samples.size(); ++s) {
      EXPECT_EQ(without.samples[s].tokens, with.samples[s].tokens);
      EXPECT_EQ(without.samples[s].support, TokenSupport());
    }
    EXPECT_NE(without.samples[0].logprobs, with.samples[0].logprobs);
  }
}

TEST_F(SampleSupportTest, IsEmptyIfNothingLeavesTokensOut) {
  SampleRequest request = Request(3, 11, 20, 5);
  request.truncated_logprobs = request.return_support = true;
  const Sample sample = Alone(request).samples[0];
  EXPECT_EQ(sample.tokens.size(), 20);
  EXPECT_EQ(sample.support, TokenSupport());
}

TEST_F(SampleSupportTest, ComesWithTheLastMessageOfAStream) {
  const SampleRequest request = Requests()[0];
  const SampleResult expected = Alone(request);
  Admit(1, request, nullptr, /*streams=*/true);
  const at::InferenceMode no_autograd;
  std::vector<int> num_supports(2, 0);
  while (loop_->active() > 0) {
    for (const SampleEvent& event : loop_->Step()) {
      for (const SampleDelta& delta : event.deltas) {
        const bool ends = delta.piece.finish_reason != FinishReason::kNone;
        if (!ends) {
          EXPECT_EQ(delta.piece.support, TokenSupport());
          continue;
        }
        EXPECT_EQ(delta.piece.support,
                  expected.samples[delta.sample_index].support);
        ++num_supports[delta.sample_index];
      }
    }
  }
  EXPECT_EQ(num_supports, (std::vector<int>{1, 1}));
}

}  // namespace
}  // namespace weft::engine
