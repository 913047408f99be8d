// SampleTokens against the distribution in f64 and the random numbers of
// src/sampling.
#include "kernels/cuda/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "src/sampling/sampler.h"
#include "tests/kernels_cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

using weft::testing::kEpsilonF32;
using weft::testing::Tolerance;

struct Drawn {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
};

// One row per rule, all of the same logits, each row in a wider one.
Drawn DrawOnDevice(const std::vector<float>& logits,
                   const std::vector<SampleRule>& rules) {
  const auto vocab = static_cast<int64_t>(logits.size());
  std::vector<float> rows;
  for (size_t r = 0; r < rules.size(); ++r) {
    rows.insert(rows.end(), logits.begin(), logits.end());
    rows.push_back(kInf);  // Between the rows, where nobody may read.
  }
  const DeviceBuffer<float> rows_device(rows);
  const DeviceBuffer<SampleRule> rules_device(rules);
  const DeviceBuffer<int32_t> tokens(std::vector<int32_t>(rules.size(), -2));
  const DeviceBuffer<float> logprobs(std::vector<float>(rules.size(), 9));
  EXPECT_EQ(SampleTokens({.num_rows = static_cast<int64_t>(rules.size()),
                          .vocab = vocab,
                          .logits_RV = rows_device.data(),
                          .row_stride = vocab + 1,
                          .rules_R = rules_device.data(),
                          .tokens_R = tokens.data(),
                          .logprobs_R = logprobs.data()},
                         nullptr),
            cudaSuccess);
  return {tokens.Read(), logprobs.Read()};
}

// What a rule keeps, in the order in which the draw adds up.
struct Kept {
  std::vector<int32_t> tokens;
  std::vector<double> weights;
  double log_total = 0;  // Of all tokens' weights, unfiltered.
};

Kept KeptBy(const std::vector<float>& logits, const SampleRule& rule) {
  const double t = rule.temperature == 0 ? 1 : rule.temperature;
  const float max = *std::max_element(logits.begin(), logits.end());
  const auto weight = [&](int32_t i) {
    return std::exp((logits[i] - max) / t);
  };
  Kept kept;
  kept.tokens.resize(logits.size());
  std::iota(kept.tokens.begin(), kept.tokens.end(), 0);
  double total = 0;
  for (const int32_t i : kept.tokens) total += weight(i);
  kept.log_total = std::log(total);
  if (rule.top_k > 0 || rule.top_p < 1) {
    std::stable_sort(
        kept.tokens.begin(), kept.tokens.end(),
        [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    if (rule.top_k > 0 && rule.top_k < static_cast<int>(logits.size())) {
      kept.tokens.resize(static_cast<size_t>(rule.top_k));
      total = 0;
      for (const int32_t i : kept.tokens) total += weight(i);
    }
    double sum = 0;
    size_t size = 0;
    while (size < kept.tokens.size() &&
           (size == 0 || sum < rule.top_p * total)) {
      sum += weight(kept.tokens[size++]);
    }
    kept.tokens.resize(size);
  }
  for (const int32_t i : kept.tokens) kept.weights.push_back(weight(i));
  return kept;
}

class CudaSamplerTest : public CudaKernelTest {
 protected:
  // The first draws of the rule's stream.
  void Check(const std::vector<float>& logits, SampleRule rule,
             uint32_t num_draws) {
    std::vector<SampleRule> rules;
    for (rule.position = 0; rule.position < num_draws; ++rule.position) {
      rules.push_back(rule);
    }
    const Drawn drawn = DrawOnDevice(logits, rules);
    const Kept kept = KeptBy(logits, rule);
    const double total =
        std::accumulate(kept.weights.begin(), kept.weights.end(), 0.0);
    const float max = *std::max_element(logits.begin(), logits.end());
    for (size_t r = 0; r < rules.size(); ++r) {
      const auto at =
          std::find(kept.tokens.begin(), kept.tokens.end(), drawn.tokens[r]) -
          kept.tokens.begin();
      ASSERT_LT(static_cast<size_t>(at), kept.tokens.size())
          << "token " << drawn.tokens[r] << " is filtered out";
      const double before =
          std::accumulate(kept.weights.begin(), kept.weights.begin() + at, 0.0);
      const double u = sampling::CounterUniform(
          rules[r].seed, rules[r].sample_index, rules[r].position);
      const double tolerance = Tolerance(kEpsilonF32, 1, 1);
      EXPECT_GE(u, before / total - tolerance);
      EXPECT_LE(u, (before + kept.weights[at]) / total + tolerance);
      const double d = (logits[drawn.tokens[r]] - max) /
                       (rule.temperature == 0 ? 1 : rule.temperature);
      EXPECT_NEAR(drawn.logprobs[r], d - kept.log_total,
                  Tolerance(kEpsilonF32, 1, std::max(1.0, -d)));
    }
  }
};

TEST_F(CudaSamplerTest, DrawsWhereTheRandomNumberFalls) {
  for (const int64_t vocab : {1, 31, 513, 3000}) {
    const std::vector<float> logits = RandomFloats(vocab, 51, 3);
    for (const float temperature : {0.3F, 1.0F, 4.0F}) {
      Check(logits,
            {.temperature = temperature,
             .seed = 0x123456789ABCDEF0,
             .sample_index = 3},
            3);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaSamplerTest, FiltersKeepTheLikeliest) {
  for (const int64_t vocab : {5, 700}) {
    std::vector<float> logits = RandomFloats(vocab, 52, 3);
    for (float& x : logits) x = std::round(x);  // Many ties, and -0.
    for (const int top_k : {0, 1, 3, 40, 5000}) {
      for (const double top_p : {1e-9, 0.5, 0.9, 1.0}) {
        Check(logits,
              {.temperature = 1.5F, .top_k = top_k, .top_p = top_p, .seed = 77},
              1);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaSamplerTest, IsGreedyAtTemperatureZeroLowestIdOnATie) {
  std::vector<float> logits = RandomFloats(1000, 53);
  logits[700] = logits[900] = 20;
  const Drawn drawn = DrawOnDevice(logits, {{.temperature = 0, .top_k = 2}});
  EXPECT_EQ(drawn.tokens[0], 700);
  EXPECT_NEAR(drawn.logprobs[0], 20 - KeptBy(logits, {}).log_total - 20,
              Tolerance(kEpsilonF32, 1, 1));
}

TEST_F(CudaSamplerTest, NeverDrawsAMaskedTokenAtAnyTemperature) {
  std::vector<float> logits(600, -kInf);
  logits[599] = -1;
  logits[10] = -3;
  for (const float temperature : {1e-37F, 1.0F, 1e30F}) {
    for (const int top_k : {0, 50}) {
      std::vector<SampleRule> rules;
      for (uint32_t i = 0; i < 3; ++i) {
        rules.push_back(
            {.temperature = temperature, .top_k = top_k, .position = i});
      }
      for (const int32_t token : DrawOnDevice(logits, rules).tokens) {
        EXPECT_TRUE(token == 599 || (token == 10 && temperature >= 1));
      }
    }
  }
}

TEST_F(CudaSamplerTest, DrawsNothingFromWhatIsNoDistribution) {
  for (const float bad : {kNan, kInf}) {
    std::vector<float> logits = RandomFloats(100, 54);
    logits[99] = bad;
    const Drawn drawn = DrawOnDevice(logits, {{}});
    EXPECT_EQ(drawn.tokens[0], -1);
    EXPECT_TRUE(std::isnan(drawn.logprobs[0]));
  }
  EXPECT_EQ(DrawOnDevice(std::vector<float>(100, -kInf), {{}}).tokens[0], -1);
}

TEST_F(CudaSamplerTest, RefusesAVocabularyOutOfRange) {
  EXPECT_EQ(SampleTokens({.num_rows = 1, .vocab = 0}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(
      SampleTokens({.num_rows = 1, .vocab = kMaxSampleVocab + 1}, nullptr),
      cudaErrorInvalidValue);
  EXPECT_EQ(SampleTokens({}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace weft::kernels::cuda
