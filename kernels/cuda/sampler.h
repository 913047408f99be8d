// Draws tokens from logits on the device.
// Legend: N rules, M rows of logits, V vocabulary.
#ifndef WEFT_KERNELS_CUDA_SAMPLER_H_
#define WEFT_KERNELS_CUDA_SAMPLER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace weft::kernels::cuda {

inline constexpr int64_t kMaxSampleVocab = int64_t{1} << 22;

// The rule by which a token is drawn. `seed`, `sample_index` and `position`
// determine the random number of the draw.
struct SampleRule {
  // 0: draws the likeliest token. If several tokens tie, draws the lowest id.
  float temperature = 1;
  int32_t top_k = 0;  // 0: all.
  double top_p = 1;   // In (0, 1]; 1 keeps all.
  uint64_t seed = 0;
  uint32_t sample_index = 0;
  uint32_t position = 0;
  int32_t row = 0;  // The logits from which it draws. Rules may share a row.
  float min_p = 0;  // In [0, 1]; 0 keeps all.
};

// All pointers are device pointers.
struct SampleRows {
  int64_t num_rules = 0;  // N.
  int64_t vocab = 0;      // V, from 1 to kMaxSampleVocab.
  const float* logits_MV = nullptr;
  int64_t row_stride = 0;
  const SampleRule* rules_N = nullptr;
  // The most filters (top_k, top_p) that a rule has, 0 to 2, and at least 1 if
  // a rule has min_p. A greedy rule has none.
  int max_filters = 2;
  void* workspace = nullptr;  // SampleWorkspaceBytes, aligned to 16.
  int32_t* tokens_N = nullptr;
  float* logprobs_N = nullptr;
  double* log_totals_N = nullptr;
};

// Returns the bytes of workspace that SampleTokens needs. It needs more if
// max_filters > 0.
size_t SampleWorkspaceBytes(int64_t num_rules, int64_t vocab, int max_filters);

// Draws a token for each rule, and writes the token, its logprob, and the log
// of the sum of exp((logits - their maximum) / T). The logprob is that of
// softmax(logits / T), before the filters. T is the temperature, or 1 for a
// temperature of 0. The token is -1 and the logprob is NaN if the row has a NaN
// or +inf, or if the row has only -inf. The same may happen if the rule has
// more than max_filters filters.
//
// The draw inverts the cumulative distribution, as src/sampling/sampler.h does.
// Without filters, the distribution is in the order of ids. With top_k, top_p
// or min_p, it is in the order of logits, highest first, and equal logits are
// in the order of ids. top_k keeps the first k tokens. Then top_p keeps the
// shortest prefix whose renormalised probability reaches top_p. Of these tokens
// min_p keeps those with at least min_p times the likeliest token's
// probability. A token's weight, relative to the likeliest token, is rounded
// down to a multiple of 2^-40. A token of weight 0 is never drawn. Sums of
// weights are exact in any order, so a rule's result depends only on the rule
// and its row.
// Units:   two launches, each of which passes over the logits. There are 5 more
//          launches if max_filters is 1, and 7 more if it is 2. The additional
//          launches skip chunks whose logits are all below a search's range.
// Errors:  cudaErrorInvalidValue for V or max_filters out of range; and those
//          of the launches.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  sampling::DrawToken.
[[nodiscard]] cudaError_t SampleTokens(const SampleRows& rows,
                                       cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_SAMPLER_H_
