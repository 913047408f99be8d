// Rows of logits in the sampler, and the chunks of a row that a warp reads.
#ifndef WEFT_KERNELS_CUDA_SAMPLE_ROW_CUH_
#define WEFT_KERNELS_CUDA_SAMPLE_ROW_CUH_

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/sampler.h"

namespace weft::kernels::cuda {

// A chunk is the logits that one warp loads at a time. Each lane loads kOfLane
// logits, in kVectors loads of 16 bytes.
constexpr int kVectors = 4;
constexpr int kOfLane = 4 * kVectors;
constexpr int64_t kChunk = kOfLane * kWarp;
// The number of units in a weight of 1. A unit is 2^-40, so that the sum of the
// weights of kMaxSampleVocab tokens is below 2^63 units.
constexpr float kUnitsPerOne = 1099511627776.0F;

// Returns the sort key of a logit: a larger logit has a larger key.
__device__ inline uint32_t KeyOf(float x) {
  // -0 and +0 are equal logits, so they get the same key.
  const uint32_t bits = __float_as_uint(x + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

// The distribution softmax(logits / temperature).
struct Row {
  const float* logits;
  int64_t vocab;
  float max;
  float inverse_temperature;

  // Returns the log of logit x's probability over that of the likeliest token.
  __device__ float LogRatio(float x) const {
    return (x - max) * inverse_temperature;
  }
  // Returns the weight of logit x in units of 2^-40, rounded down. The
  // likeliest token has 2^40 units.
  __device__ uint64_t Weight(float x) const {
    return static_cast<uint64_t>(expf(LogRatio(x)) * kUnitsPerOne);
  }
};

__device__ inline bool IsFiltered(const SampleRule& rule) {
  return rule.temperature > 0 &&
         (rule.top_k > 0 || rule.top_p < 1 || rule.min_p > 0);
}

__device__ inline Row RowOf(const SampleRows& rows, const SampleRule& rule,
                            float max) {
  // Without the bound of 1e30, a tiny temperature would give 0 * infinity = NaN
  // for the largest logit.
  return {rows.logits_MV + rule.row * rows.row_stride, rows.vocab, max,
          rule.temperature > 0 ? fminf(1 / rule.temperature, 1e30F) : 1};
}

// Returns whether a token can be drawn from a row with this maximum.
__device__ inline bool IsDistribution(float max) {
  return max > -INFINITY && max < INFINITY;
}

// Returns the token id of the lane's i-th logit in a chunk.
__device__ inline int64_t TokenOf(int64_t chunk, int i) {
  return chunk * kChunk + i / 4 * (4 * kWarp) + Lane() * 4 + i % 4;
}

// Loads the lane's logits of a chunk. Sets x to -inf for tokens beyond the
// vocabulary, so that they are never drawn.
__device__ inline void LoadChunk(const SampleRows& rows, int32_t row,
                                 int64_t chunk, float (&x)[kOfLane]) {
  const float* logits = rows.logits_MV + row * rows.row_stride;
  if ((chunk + 1) * kChunk <= rows.vocab &&
      reinterpret_cast<uintptr_t>(logits) % sizeof(float4) == 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float4 vector =
          *reinterpret_cast<const float4*>(logits + TokenOf(chunk, 4 * v));
      x[4 * v] = vector.x;
      x[4 * v + 1] = vector.y;
      x[4 * v + 2] = vector.z;
      x[4 * v + 3] = vector.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int64_t token = TokenOf(chunk, i);
    x[i] = token < rows.vocab ? logits[token] : -INFINITY;
  }
}

// Maps a random number of 24 bits to a target from 1 to `total`, which is a sum
// of weights.
__device__ inline uint64_t TargetOf(uint64_t total, uint32_t random) {
  // Computes floor(total * random / 2^24) in 64 bits.
  const uint64_t low = (total & 0xFFFFFFU) * random >> 24;
  return (total >> 24) * random + low + 1;
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_SAMPLE_ROW_CUH_
