// Draws tokens from logits on the device.
// Legend: N rules, M rows of logits, V vocabulary.
#ifndef WEFT_KERNELS_CUDA_SAMPLER_H_
#define WEFT_KERNELS_CUDA_SAMPLER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace weft::kernels::cuda {

inline constexpr int64_t kMaxSampleVocab = int64_t{1} << 22;

// How a token is drawn, and its place in the stream of random numbers.
struct SampleRule {
  float temperature = 1;  // 0: the most likely token, lowest id on a tie.
  int32_t top_k = 0;      // 0: all.
  double top_p = 1;       // In (0, 1]; 1: all.
  uint64_t seed = 0;
  uint32_t sample_index = 0;
  uint32_t position = 0;
  // The row of the logits that it draws from. Rules may share a row. -1: no
  // rule.
  int32_t row = 0;
};

// All pointers are device pointers. Launches depend only on num_rules, vocab
// and max_filters. The rules may change before a graph is replayed.
struct SampleRows {
  int64_t num_rules = 0;  // N.
  int64_t vocab = 0;      // V, 1 to kMaxSampleVocab.
  const float* logits_MV = nullptr;
  int64_t row_stride = 0;
  const SampleRule* rules_N = nullptr;
  // The most filters (top_k, top_p) of a rule, 0 to 2. A greedy rule has none.
  int max_filters = 2;
  void* workspace = nullptr;  // SampleWorkspaceBytes, aligned to 16.
  int32_t* tokens_N = nullptr;
  float* logprobs_N = nullptr;
};

// Returns the workspace of SampleTokens in bytes. Filters need more.
[[nodiscard]] size_t SampleWorkspaceBytes(int64_t num_rules, int64_t vocab,
                                          int max_filters);

// The token and its logprob under softmax(logits / T), unfiltered, T = 1 for a
// temperature of 0; token -1 and logprob NaN if nothing can be drawn: a NaN,
// +inf, or -inf everywhere, or no rule.
//
// The draw is that of src/sampling/sampler.h: by inverse cumulative
// distribution, unfiltered in order of id, with top_k or top_p in order of
// logit, highest first, lower id first on a tie; top_k keeps the first k, top_p
// then the shortest prefix whose renormalised probability reaches it. Weights
// relative to the likeliest token are whole multiples of 2^-40, so that sums
// are exact in any order: a rule's result depends only on the rule and its row.
// A token of less weight is not drawn.
// Units: two launches, each a pass over the logits; with one filter 5 more,
// with two 7 more, which skip logits below the cut.
// Errors:  cudaErrorInvalidValue for V or max_filters out of range.
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  sampling::DrawToken.
[[nodiscard]] cudaError_t SampleTokens(const SampleRows& rows,
                                       cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_SAMPLER_H_
