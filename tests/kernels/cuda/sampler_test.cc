// Compares SampleTokens with the distribution in f64 and the random numbers of
// src/sampling.
#include "kernels/cuda/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "src/sampling/sampler.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

struct Drawn {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<double> log_totals;
};

// Draws from the rows of `logits`. Between the rows are infinite values, which
// the kernels must not read. Each row begins `offset` floats after a multiple
// of 16 bytes.
Drawn DrawFromRows(const std::vector<std::vector<float>>& logits,
                   const std::vector<SampleRule>& rules, int max_filters = 2,
                   size_t offset = 0) {
  const auto vocab = static_cast<int64_t>(logits[0].size());
  const int64_t stride = (vocab + 4) / 4 * 4;
  std::vector<float> rows(offset, kInf);
  for (const std::vector<float>& row : logits) {
    rows.insert(rows.end(), row.begin(), row.end());
    rows.resize(rows.size() + static_cast<size_t>(stride - vocab), kInf);
  }
  const auto num_rules = static_cast<int64_t>(rules.size());
  const DeviceBuffer<float> rows_device(rows);
  const DeviceBuffer<SampleRule> rules_device(rules);
  const DeviceBuffer<int32_t> tokens(std::vector<int32_t>(rules.size(), -2));
  const DeviceBuffer<float> logprobs(std::vector<float>(rules.size(), 9));
  const DeviceBuffer<double> log_totals(std::vector<double>(rules.size(), 9));
  // The result must not depend on what the workspace held before.
  const DeviceBuffer<uint8_t> workspace(std::vector<uint8_t>(
      SampleWorkspaceBytes(num_rules, vocab, max_filters), 0xA5));
  EXPECT_EQ(SampleTokens({.num_rules = num_rules,
                          .vocab = vocab,
                          .logits_MV = rows_device.data() + offset,
                          .row_stride = stride,
                          .rules_N = rules_device.data(),
                          .max_filters = max_filters,
                          .workspace = workspace.data(),
                          .tokens_N = tokens.data(),
                          .logprobs_N = logprobs.data(),
                          .log_totals_N = log_totals.data()},
                         nullptr),
            cudaSuccess);
  return {tokens.Read(), logprobs.Read(), log_totals.Read()};
}

Drawn DrawOnDevice(const std::vector<float>& logits,
                   const std::vector<SampleRule>& rules) {
  return DrawFromRows({logits}, rules);
}

// The tokens that a rule keeps, in the order in which the draw adds them up.
struct Kept {
  std::vector<int32_t> tokens;
  std::vector<double> weights;
  double log_total = 0;  // Log of the sum of all tokens' weights, without
                         // filters.
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
  if (rule.top_k > 0 || rule.top_p < 1 || rule.min_p > 0) {
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
    while (weight(kept.tokens[size - 1]) < rule.min_p) --size;
    kept.tokens.resize(size);
  }
  for (const int32_t i : kept.tokens) kept.weights.push_back(weight(i));
  return kept;
}

class CudaSamplerTest : public CudaKernelTest {
 protected:
  // Checks each drawn token: the random number must fall into the token's part
  // of the sum over the tokens that the rule keeps.
  static void Check(const std::vector<float>& logits,
                    const std::vector<SampleRule>& rules, const Drawn& drawn) {
    for (size_t r = 0; r < rules.size(); ++r) {
      if (r == 0 || !SameFilters(rules[r], rules[r - 1])) {
        kept_ = KeptBy(logits, rules[r]);
      }
      CheckOne(logits, rules[r], drawn.tokens[r], drawn.logprobs[r]);
      if (HasFatalFailure()) return;
    }
  }
  // Checks the first `num_draws` draws of the rule's random numbers.
  static void Check(const std::vector<float>& logits, SampleRule rule,
                    uint32_t num_draws) {
    std::vector<SampleRule> rules;
    for (rule.position = 0; rule.position < num_draws; ++rule.position) {
      rules.push_back(rule);
    }
    Check(logits, rules, DrawOnDevice(logits, rules));
  }

 private:
  static bool SameFilters(const SampleRule& a, const SampleRule& b) {
    return a.temperature == b.temperature && a.top_k == b.top_k &&
           a.top_p == b.top_p && a.min_p == b.min_p;
  }
  static void CheckOne(const std::vector<float>& logits, const SampleRule& rule,
                       int32_t token, float logprob) {
    const auto at = std::find(kept_.tokens.begin(), kept_.tokens.end(), token) -
                    kept_.tokens.begin();
    ASSERT_LT(static_cast<size_t>(at), kept_.tokens.size())
        << "token " << token << " is filtered out";
    const double max = *std::max_element(logits.begin(), logits.end());
    const double d =
        (logits[token] - max) / (rule.temperature == 0 ? 1 : rule.temperature);
    EXPECT_NEAR(logprob, d - kept_.log_total,
                Tolerance(kEpsilonF32, 1, std::max(1.0, -d)));
    if (rule.temperature == 0) {
      EXPECT_EQ(token, std::max_element(logits.begin(), logits.end()) -
                           logits.begin());
      return;
    }
    const auto begin = kept_.weights.begin();
    const double total = std::accumulate(begin, kept_.weights.end(), 0.0);
    const double before = std::accumulate(begin, begin + at, 0.0);
    const double u =
        sampling::CounterUniform(rule.seed, rule.sample_index, rule.position);
    const double tolerance = Tolerance(kEpsilonF32, 1, 1);
    EXPECT_GE(u, before / total - tolerance);
    EXPECT_LE(u, (before + kept_.weights[at]) / total + tolerance);
  }

  inline static Kept kept_;
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
    for (float& x : logits)
      x = std::round(x);  // Rounding makes many ties, and
                          // -0.
    for (const int top_k : {0, 1, 40, 5000}) {
      for (const double top_p : {1e-9, 0.7, 1.0}) {
        Check(logits,
              {.temperature = 1.5F, .top_k = top_k, .top_p = top_p, .seed = 77},
              1);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// min_p alone, and as the narrower and the wider one of two filters.
TEST_F(CudaSamplerTest, MinPKeepsTokensThatAreLikelyEnough) {
  for (const int64_t vocab : {5, 600}) {
    std::vector<float> logits = RandomFloats(vocab, 59, 3);
    for (float& x : logits) x = std::round(x * 4) / 4;  // There are ties.
    for (const float min_p : {1e-3F, 0.1F, 1.0F}) {
      for (const int top_k : {0, 40}) {
        for (const double top_p : {0.7, 1.0}) {
          Check(logits,
                {.temperature = 1.5F,
                 .top_k = top_k,
                 .top_p = top_p,
                 .seed = 78,
                 .min_p = min_p},
                2);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  const std::vector<float> logits = RandomFloats(700, 60, 3);
  const SampleRule alone = {.seed = 5, .min_p = 0.2F};
  Check(logits, {alone}, DrawFromRows({logits}, {alone}, /*max_filters=*/1));
}

TEST_F(CudaSamplerTest, IsGreedyAtTemperatureZeroLowestIdOnATie) {
  std::vector<float> logits = RandomFloats(1000, 53);
  logits[700] = logits[900] = 20;
  const Drawn drawn = DrawOnDevice(logits, {{.temperature = 0, .top_k = 2}});
  EXPECT_EQ(drawn.tokens[0], 700);
  EXPECT_NEAR(drawn.logprobs[0], 20 - KeptBy(logits, {}).log_total - 20,
              Tolerance(kEpsilonF32, 1, 1));
}

// Rules of every kind run in one call, at the sizes of served models.
TEST_F(CudaSamplerTest, RulesOfAllKindsDrawFromOneLongRow) {
  for (const int64_t vocab : {49152, 131072}) {
    const std::vector<float> logits = RandomFloats(vocab, 55, 4);
    std::vector<SampleRule> rules = {{.temperature = 0.7F, .seed = 6},
                                     {.top_k = 20, .top_p = 0.95, .seed = 9}};
    if (vocab < 100000) {
      rules.push_back({.temperature = 0});
      rules.push_back({.top_k = 50, .seed = 7});
      rules.push_back({.top_p = 0.9, .seed = 8});
    }
    Check(logits, rules, DrawOnDevice(logits, rules));
  }
}

// If all logits are equal, filters order the tokens by id.
TEST_F(CudaSamplerTest, FiltersAmongNothingButTies) {
  const std::vector<float> logits(2600, -2);
  for (const SampleRule& rule :
       {SampleRule{.top_k = 1111, .seed = 3}, SampleRule{.top_p = 0.25},
        SampleRule{.top_k = 5000, .seed = 4},
        SampleRule{.top_k = 1800, .top_p = 0.5, .seed = 5}}) {
    Check(logits, rule, 3);
  }
}

TEST_F(CudaSamplerTest, ManySeedsDrawWhatTheCpuDraws) {
  for (const int64_t vocab : {5, 40}) {
    const std::vector<float> logits = RandomFloats(vocab, 56, 2);
    std::vector<SampleRule> rules;
    for (uint32_t i = 0; i < 32; ++i) {
      rules.push_back({.temperature = 0.5F + static_cast<float>(i % 3),
                       .top_k = i % 4 == 1 ? 3 : 0,
                       .top_p = i % 4 == 2 ? 0.8 : 1,
                       .seed = i * 0x9E3779B97F4A7C15,
                       .sample_index = i % 7,
                       .position = i % 11,
                       .min_p = i % 8 > 4 ? 0.15F : 0});
    }
    const Drawn drawn = DrawOnDevice(logits, rules);
    for (size_t r = 0; r < rules.size(); ++r) {
      const SampleRule& rule = rules[r];
      const auto expected =
          sampling::DrawToken(logits,
                              {.temperature = rule.temperature,
                               .top_k = rule.top_k,
                               .top_p = rule.top_p,
                               .min_p = rule.min_p},
                              sampling::CounterUniform(
                                  rule.seed, rule.sample_index, rule.position));
      EXPECT_EQ(drawn.tokens[r], expected->token) << r;
    }
  }
}

TEST_F(CudaSamplerTest, RulesNameTheirRow) {
  std::vector<std::vector<float>> logits;
  for (int64_t row = 0; row < 3; ++row) {
    logits.push_back(RandomFloats(1100, 57 + row, 3));
  }
  logits[1][1099] = kNan;
  std::vector<SampleRule> rules;
  for (const int32_t row : {2, 0, 2, 1, 0, 0}) {
    const auto index = static_cast<uint32_t>(rules.size());
    rules.push_back(
        {.top_k = index % 3 == 0 ? 9 : 0, .sample_index = index, .row = row});
  }
  // With offset 0 the rows are aligned to 16 bytes, with offset 1 they are not.
  for (const size_t offset : {0, 1}) {
    const Drawn drawn = DrawFromRows(logits, rules, 1, offset);
    for (size_t r = 0; r < rules.size(); ++r) {
      SampleRule alone = rules[r];
      if (alone.row == 1) {
        EXPECT_EQ(drawn.tokens[r], -1);
        EXPECT_TRUE(std::isnan(drawn.logprobs[r]));
        continue;
      }
      alone.row = 0;
      const Drawn expected = DrawOnDevice(logits[rules[r].row], {alone});
      EXPECT_EQ(drawn.tokens[r], expected.tokens[0]) << r;
      EXPECT_EQ(drawn.logprobs[r], expected.logprobs[0]) << r;
      EXPECT_EQ(drawn.log_totals[r], expected.log_totals[0]) << r;
    }
  }
}

// With `max_filters` 0, a rule with a filter has no workspace for its counts.
// The rule must then draw no token, rather than a wrong one.
TEST_F(CudaSamplerTest, DrawsNothingByARuleOfMoreFiltersThanAnnounced) {
  const std::vector<float> logits = RandomFloats(100, 58);
  const std::vector<SampleRule> rules = {{}, {.top_k = 3}, {.temperature = 0}};
  const Drawn drawn = DrawFromRows({logits}, rules, 0);
  EXPECT_GE(drawn.tokens[0], 0);
  EXPECT_EQ(drawn.tokens[1], -1);
  EXPECT_GE(drawn.tokens[2], 0);
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
  const std::vector<SampleRule> rules = {
      {}, {.temperature = 0}, {.top_k = 3}, {.top_p = 0.5}};
  std::vector<std::vector<float>> rows(3, RandomFloats(700, 54));
  rows[0][699] = kNan;
  rows[1][0] = kInf;
  rows[2].assign(700, -kInf);
  for (const std::vector<float>& logits : rows) {
    const Drawn drawn = DrawOnDevice(logits, rules);
    for (size_t r = 0; r < rules.size(); ++r) {
      EXPECT_EQ(drawn.tokens[r], -1);
      EXPECT_TRUE(std::isnan(drawn.logprobs[r]));
    }
  }
}

TEST_F(CudaSamplerTest, RefusesWhatIsOutOfRange) {
  for (const SampleRows& rows :
       {SampleRows{.num_rules = 1, .vocab = 0},
        SampleRows{.num_rules = 1, .vocab = kMaxSampleVocab + 1},
        SampleRows{.num_rules = 1, .vocab = 9, .max_filters = 3},
        SampleRows{.num_rules = 1, .vocab = 9, .max_filters = -1}}) {
    EXPECT_EQ(SampleTokens(rows, nullptr), cudaErrorInvalidValue);
  }
  EXPECT_EQ(SampleTokens({}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace weft::kernels::cuda
