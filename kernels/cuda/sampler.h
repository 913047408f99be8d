// Draws tokens from logits on the device.
// Legend: N rules, M rows of logits, V vocabulary.
#ifndef WEFT_KERNELS_CUDA_SAMPLER_H_
#define WEFT_KERNELS_CUDA_SAMPLER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace weft::kernels::cuda {

inline constexpr int64_t kMaxSampleVocab = int64_t{1} << 22;

// How a token is drawn, and where its random number is in the sample's stream.
struct SampleRule {
  float temperature = 1;  // 0 draws the likeliest token, the lowest id on a
                          // tie.
  int32_t top_k = 0;      // 0: all.
  double top_p = 1;       // In (0, 1]; 1 keeps all.
  uint64_t seed = 0;
  uint32_t sample_index = 0;
  uint32_t position = 0;
  // The row of logits from which it draws. Rules may share a row. -1: no rule.
  int32_t row = 0;
};

// All pointers are device pointers. Launches depend only on num_rules, vocab
// and max_filters. The rules may change before a graph is replayed.
struct SampleRows {
  int64_t num_rules = 0;  // N.
  int64_t vocab = 0;      // V, from 1 to kMaxSampleVocab.
  const float* logits_MV = nullptr;
  int64_t row_stride = 0;
  const SampleRule* rules_N = nullptr;
  // The most filters (top_k, top_p) that a rule has, 0 to 2. A greedy rule has
  // none.
  int max_filters = 2;
  void* workspace = nullptr;  // SampleWorkspaceBytes, aligned to 16.
  int32_t* tokens_N = nullptr;
  float* logprobs_N = nullptr;
};

// Returns the bytes of workspace that SampleTokens needs. Filters need more.
[[nodiscard]] size_t SampleWorkspaceBytes(int64_t num_rules, int64_t vocab,
                                          int max_filters);

// Gives each rule's token and its logprob under softmax(logits / T) without
// filters, with T = 1 for a temperature of 0. If nothing can be drawn, the
// token is -1 and the logprob NaN: the row has a NaN or +inf, or only -inf, or
// there is no rule.
//
// The draw is that of src/sampling/sampler.h, by inverse cumulative
// distribution. Without filters the order is that of ids. With top_k or top_p
// it is by logit, highest first, and on a tie by id, lowest first. top_k keeps
// the first k tokens, and top_p then keeps the shortest prefix whose
// renormalised probability reaches it. Weights relative to the likeliest token
// are whole multiples of 2^-40, and a token with a smaller weight is never
// drawn. Sums of such weights are exact in any order, so a rule's result
// depends only on the rule and its row.
// Units:   two launches, each a pass over the logits; 5 more with one filter, 7
//          more with two, which skip logits below the cut.
// Errors:  cudaErrorInvalidValue for V or max_filters out of range.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  sampling::DrawToken.
[[nodiscard]] cudaError_t SampleTokens(const SampleRows& rows,
                                       cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_SAMPLER_H_
