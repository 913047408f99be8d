#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/sampler.h"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 512;
// Weights are multiples of 2^-40: their sum over kMaxSampleVocab tokens stays
// below 2^63.
constexpr float kUnitsPerOne = 1099511627776.0F;

// A number that is larger for a larger logit.
__device__ uint32_t KeyOf(float x) {
  // -0 and +0 are one logit.
  const uint32_t bits = __float_as_uint(x + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

// softmax(logits / temperature) of one row.
struct Row {
  const float* logits;
  int64_t vocab;
  float max;
  float inverse_temperature;

  [[nodiscard]] __device__ uint64_t Weight(int64_t token) const {
    const float d = (logits[token] - max) * inverse_temperature;
    return static_cast<uint64_t>(expf(d) * kUnitsPerOne);
  }
};

// Sum of measure(token) over the tokens that satisfy `counts`.
template <typename Measure, typename Counts>
__device__ uint64_t SumWhere(const Row& row, Measure measure, Counts counts) {
  uint64_t sum = 0;
  for (int64_t token = threadIdx.x; token < row.vocab; token += kThreads) {
    if (counts(token)) sum += measure(token);
  }
  return BlockReduce(sum, Add());
}

// The first token, in order of id, up to and with which the measure sums up to
// `target`, 1 to the whole sum.
template <typename Measure>
__device__ int64_t FindById(const Row& row, Measure measure, uint64_t target) {
  int64_t token = 0;
  for (int64_t bit = kMaxSampleVocab >> 1; bit > 0; bit >>= 1) {
    const int64_t candidate = token | bit;
    if (candidate >= row.vocab) continue;
    const uint64_t before =
        SumWhere(row, measure, [&](int64_t t) { return t < candidate; });
    if (before < target) token = candidate;
  }
  return token;
}

// A place in the order by logit: all tokens of larger keys, and the first
// `num_ties` of this key, in order of id.
struct Cut {
  uint32_t key;
  uint64_t num_ties;
  uint64_t sum;  // Of the measure, up to and with the place.
};

// The first place up to which the measure, which is the same for tokens of one
// key, sums up to `target`, 1 to the whole sum.
template <typename Measure>
__device__ Cut FindByLogit(const Row& row, Measure measure, uint64_t target) {
  const auto key_at = [&](int64_t t) { return KeyOf(row.logits[t]); };
  uint32_t key = 0;
  for (uint32_t bit = 0x80000000U; bit > 0; bit >>= 1) {
    const uint32_t candidate = key | bit;
    const uint64_t sum = SumWhere(
        row, measure, [&](int64_t t) { return key_at(t) >= candidate; });
    if (sum >= target) key = candidate;
  }
  const uint64_t above =
      SumWhere(row, measure, [&](int64_t t) { return key_at(t) > key; });
  const uint64_t ties = SumWhere(
      row, [](int64_t) { return uint64_t{1}; },
      [&](int64_t t) { return key_at(t) == key; });
  const uint64_t of_ties =
      SumWhere(row, measure, [&](int64_t t) { return key_at(t) == key; });
  const uint64_t each = of_ties / ties;
  const uint64_t num_ties = (target - above + each - 1) / each;
  return {key, num_ties, above + num_ties * each};
}

// Where of a sum of weights a random number of 24 bits falls, 1 to `total`.
__device__ uint64_t TargetOf(uint64_t total, uint32_t random) {
  // floor(total * random / 2^24) without more than 64 bits.
  const uint64_t low = (total & 0xFFFFFFU) * random >> 24;
  return (total >> 24) * random + low + 1;
}

__device__ int64_t DrawFiltered(const Row& row, const SampleRule& rule,
                                uint64_t total, uint32_t random) {
  const auto weight = [&](int64_t t) { return row.Weight(t); };
  const auto one = [](int64_t) { return uint64_t{1}; };
  uint64_t kept = total;
  if (rule.top_k > 0 && rule.top_k < row.vocab) {
    const Cut last = FindByLogit(row, one, static_cast<uint64_t>(rule.top_k));
    const auto is_above = [&](int64_t t) {
      return KeyOf(row.logits[t]) > last.key;
    };
    const auto is_tie = [&](int64_t t) {
      return KeyOf(row.logits[t]) == last.key;
    };
    const uint64_t above = SumWhere(row, weight, is_above);
    const uint64_t ties = SumWhere(row, one, is_tie);
    kept = above + SumWhere(row, weight, is_tie) / ties * last.num_ties;
  }
  if (rule.top_p < 1) {
    const double wanted = ceil(rule.top_p * static_cast<double>(kept));
    uint64_t target = wanted < 1 ? 1 : static_cast<uint64_t>(wanted);
    // A rounding of `kept` to f64 may have gone up.
    if (target > kept) target = kept;
    kept = FindByLogit(row, weight, target).sum;
  }
  const Cut drawn = FindByLogit(row, weight, TargetOf(kept, random));
  const auto is_tie = [&](int64_t t) {
    return KeyOf(row.logits[t]) == drawn.key ? uint64_t{1} : uint64_t{0};
  };
  return FindById(row, is_tie, drawn.num_ties);
}

__global__ void __launch_bounds__(kThreads) SampleKernel(SampleRows rows) {
  const SampleRule rule = rows.rules_R[blockIdx.x];
  Row row = {rows.logits_RV + blockIdx.x * rows.row_stride, rows.vocab, 0, 1};
  float max = -INFINITY;
  int invalid = 0;
  for (int64_t t = threadIdx.x; t < row.vocab; t += kThreads) {
    const float x = row.logits[t];
    max = fmaxf(max, x);
    if (!(x < INFINITY)) invalid = 1;  // NaN too.
  }
  row.max = BlockReduce(max, Max());
  invalid = BlockReduce(invalid, Add());
  if (invalid != 0 || row.max == -INFINITY) {
    if (threadIdx.x == 0) {
      rows.tokens_R[blockIdx.x] = -1;
      rows.logprobs_R[blockIdx.x] = NAN;
    }
    return;
  }
  if (rule.temperature > 0) {
    // The bound keeps 0 * (1 / T) from becoming NaN for a tiny T.
    row.inverse_temperature = fminf(1 / rule.temperature, 1e30F);
  }
  const auto weight = [&](int64_t t) { return row.Weight(t); };
  const uint64_t total = SumWhere(row, weight, [](int64_t) { return true; });
  const uint32_t random = Philox24(rule.seed, rule.sample_index, rule.position);
  int64_t token = 0;
  if (rule.temperature == 0) {
    token = FindById(
        row,
        [&](int64_t t) {
          return row.logits[t] == row.max ? uint64_t{1} : uint64_t{0};
        },
        1);
  } else if (rule.top_k > 0 || rule.top_p < 1) {
    token = DrawFiltered(row, rule, total, random);
  } else {
    token = FindById(row, weight, TargetOf(total, random));
  }
  if (threadIdx.x == 0) {
    rows.tokens_R[blockIdx.x] = static_cast<int32_t>(token);
    const double log_total =
        log(static_cast<double>(total) / static_cast<double>(kUnitsPerOne));
    const double d = (static_cast<double>(row.logits[token]) - row.max) *
                     static_cast<double>(row.inverse_temperature);
    rows.logprobs_R[blockIdx.x] = static_cast<float>(d - log_total);
  }
}

}  // namespace

cudaError_t SampleTokens(const SampleRows& rows, cudaStream_t stream) {
  if (rows.num_rows == 0) return cudaSuccess;
  if (rows.vocab < 1 || rows.vocab > kMaxSampleVocab) {
    return cudaErrorInvalidValue;
  }
  return Launch(SampleKernel, rows.num_rows, 1, kThreads, stream, rows);
}

}  // namespace weft::kernels::cuda
