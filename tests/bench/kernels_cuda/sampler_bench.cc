// Times SampleTokens, with and without filters.
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/sampler.h"
#include "tests/bench/kernels_cuda/bench.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr int64_t kVocab = 131072;
constexpr int64_t kMaxRows = 256;

struct Filter {
  const char* name;
  int32_t top_k;
  double top_p;
};
constexpr Filter kFilters[] = {{"none", 0, 1},
                               {"top_p 0.9", 0, 0.9},
                               {"top_k 50", 50, 1},
                               {"top_k 20, top_p 0.95", 20, 0.95}};

// Returns normally distributed logits. Their standard deviation is typical of a
// trained model.
std::vector<float> Logits() {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal(0, 3);
  // The logits repeat a pattern. Its length is prime, so that no two rows are
  // the same.
  std::vector<float> pattern(1000003);
  for (float& x : pattern) x = normal(generator);
  std::vector<float> logits;
  logits.reserve(kMaxRows * kVocab);
  for (int64_t i = 0; i < kMaxRows * kVocab; ++i) {
    logits.push_back(pattern[static_cast<size_t>(i) % pattern.size()]);
  }
  return logits;
}

// Checks that the row's filter keeps the token, and checks the token's logprob.
void CheckRow(const std::vector<float>& logits, const Filter& filter,
              int32_t token, float logprob) {
  const std::string what = std::string("SampleTokens, ") + filter.name;
  Check(token >= 0 && token < kVocab, what + ": no token");
  const float own = logits[static_cast<size_t>(token)];
  double sum = 0, likelier_sum = 0;
  int64_t num_likelier = 0;
  for (const float x : logits) {
    const double weight = std::exp(static_cast<double>(x));
    sum += weight;
    if (x > own) {
      likelier_sum += weight;
      ++num_likelier;
    }
  }
  CheckNear(logprob, own - std::log(sum), kEpsilonF32, kVocab, 20, what);
  Check(filter.top_k == 0 || num_likelier < filter.top_k,
        what + ": not of the likeliest");
  Check(likelier_sum / sum < filter.top_p + kEpsilonF32,
        what + ": not of the nucleus");
}

void BenchFilter(const Device& device, const FloatBuffer& logits,
                 const Filter& filter, int64_t num_rows) {
  std::vector<SampleRule> rules;
  for (int64_t r = 0; r < num_rows; ++r) {
    rules.push_back({.top_k = filter.top_k,
                     .top_p = filter.top_p,
                     .seed = 7,
                     .sample_index = static_cast<uint32_t>(r),
                     .row = static_cast<int32_t>(r)});
  }
  const int max_filters =
      (filter.top_k > 0 ? 1 : 0) + (filter.top_p < 1 ? 1 : 0);
  const Buffer<SampleRule> rules_device(rules);
  const Buffer<int32_t> tokens(std::vector<int32_t>(rules.size(), -1));
  const FloatBuffer logprobs(num_rows);
  const Buffer<double> log_totals(std::vector<double>(rules.size(), 0));
  const size_t workspace_bytes =
      SampleWorkspaceBytes(num_rows, kVocab, max_filters);
  const FloatBuffer workspace(
      static_cast<int64_t>(workspace_bytes / sizeof(float)));
  const auto run = [&] {
    Check(SampleTokens({.num_rules = num_rows,
                        .vocab = kVocab,
                        .logits_MV = logits.data(),
                        .row_stride = kVocab,
                        .rules_N = rules_device.data(),
                        .max_filters = max_filters,
                        .workspace = workspace.data(),
                        .tokens_N = tokens.data(),
                        .logprobs_N = logprobs.data(),
                        .log_totals_N = log_totals.data()},
                       nullptr));
  };
  run();
  for (const int64_t r : {int64_t{0}, num_rows - 1}) {
    CheckRow(logits.Read(r * kVocab, kVocab), filter, tokens.Read(r, 1)[0],
             logprobs.Read(r, 1)[0]);
  }
  Line line("SampleTokens");
  line.Add("rows", num_rows).Add("filter", filter.name);
  line.AddBytes(device, 4.0 * static_cast<double>(num_rows * kVocab), run)
      .Print();
}

}  // namespace

void BenchSampler(const Device& device) {
  const FloatBuffer logits(Logits());
  for (const Filter& filter : kFilters) {
    for (const int64_t num_rows :
         {int64_t{1}, int64_t{8}, int64_t{64}, kMaxRows}) {
      BenchFilter(device, logits, filter, num_rows);
    }
  }
}

}  // namespace weft::kernels::cuda::bench
