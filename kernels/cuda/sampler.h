// Logits to token, one row per sequence, without leaving the device.
// Legend: R rows, V vocabulary.
#ifndef WEFT_KERNELS_CUDA_SAMPLER_H_
#define WEFT_KERNELS_CUDA_SAMPLER_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::kernels::cuda {

inline constexpr int64_t kMaxSampleVocab = int64_t{1} << 22;

// How a row is drawn from, and its place in the stream of random numbers.
struct SampleRule {
  float temperature = 1;  // 0: the most likely token, lowest id on a tie.
  int32_t top_k = 0;      // 0: all.
  double top_p = 1;       // In (0, 1]; 1: all.
  uint64_t seed = 0;
  uint32_t sample_index = 0;
  uint32_t position = 0;
};

// All pointers are the device's.
struct SampleRows {
  int64_t num_rows = 0;  // R.
  int64_t vocab = 0;     // V, 1 to kMaxSampleVocab.
  const float* logits_RV = nullptr;
  int64_t row_stride = 0;
  const SampleRule* rules_R = nullptr;
  int32_t* tokens_R = nullptr;
  float* logprobs_R = nullptr;
};

// The token and its logprob under softmax(logits / T), unfiltered, T = 1 for a
// temperature of 0; token -1 and logprob NaN where nothing can be drawn: a NaN,
// +inf, or -inf everywhere.
//
// The draw is that of src/sampling/sampler.h: by inverse cumulative
// distribution, unfiltered in order of id, with top_k or top_p in order of
// logit, highest first, lower id first on a tie; top_k keeps the first k, top_p
// then the shortest prefix whose renormalised probability reaches it. Weights
// relative to the likeliest token are whole multiples of 2^-40, so that sums
// are exact in any order: a row's result depends on the row and its rule alone.
// A token of less weight is not drawn.
// Units:   O(V) per bit of the search: about 20 passes over a row unfiltered,
//          40 to 120 with filters, from the cache.
// Errors:  cudaErrorInvalidValue for V out of range.
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  sampling::DrawToken.
[[nodiscard]] cudaError_t SampleTokens(const SampleRows& rows,
                                       cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_SAMPLER_H_
