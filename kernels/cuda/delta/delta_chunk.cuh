// What the forward and the backward pass of the gated delta rule in chunks
// share. A block computes kSlice value features of one head of one tree, chunk
// after chunk. All columns of a state are independent of each other, and the
// gradients of keys and gates are sums over them. What depends on no state is
// computed before, for all chunks at once (delta_scores.cu).
//
// Legend: that of gated_delta.h. Rows beyond a chunk's end have q, k, v and
// beta 0 and g 0, so they change nothing.
#ifndef WEFT_KERNELS_CUDA_DELTA_DELTA_CHUNK_CUH_
#define WEFT_KERNELS_CUDA_DELTA_DELTA_CHUNK_CUH_

#include "kernels/cuda/delta/delta_tile.cuh"
#include "kernels/cuda/delta/gated_delta.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda::delta {

// Returns the sum of the values of all lanes up to the thread's own. All lanes
// call it.
template <typename T>
__device__ T PrefixSum(T sum) {
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, offset);
    if (Lane() >= offset) sum += other;
  }
  return sum;
}

// The gates of a chunk's rows. G, the running sum of g, may be large while the
// difference of two G is small, so it is the sum of two floats.
struct Gates {
  float beta[kRows];
  float high[kRows];
  float low[kRows];
  float from_start[kRows];  // e^G.
  float to_end[kRows];      // e^(G_C - G).

  // Returns e^(G_t - G_i) for i <= t, and 0 for other i.
  __device__ float Decay(int t, int i) const {
    return i <= t ? expf((high[t] - high[i]) + (low[t] - low[i])) : 0.0F;
  }
  __device__ float whole() const { return from_start[kRows - 1]; }

  // Warp 0 calls it.
  __device__ void Fill(const DeltaRuleRows& rows, const DeltaChunkRange& chunk,
                       int64_t head) {
    const int64_t size = chunk.end - chunk.begin;
    double own[2];
    for (int j = 0; j < 2; ++j) {
      const int t = 2 * Lane() + j;
      const int64_t at = (chunk.begin + t) * rows.num_value_heads + head;
      beta[t] = t < size ? rows.beta_TH[at] : 0.0F;
      own[j] = t < size ? rows.g_TH[at] : 0.0F;
    }
    own[1] += own[0];
    const double sum = PrefixSum(own[1]);
    const double before = sum - own[1];
    const double last = __shfl_sync(kAllLanes, sum, kWarp - 1);
    for (int j = 0; j < 2; ++j) {
      const int t = 2 * Lane() + j;
      const double g = before + own[j];
      high[t] = static_cast<float>(g);
      low[t] = static_cast<float>(g - high[t]);
      from_start[t] = expf(high[t]);
      to_end[t] = expf(static_cast<float>(last - g));
    }
  }
};

// What a block computes: a head of one tree (or chunk), and some of its value
// features.
struct Place {
  int64_t index;  // Of the tree or the chunk.
  int64_t head;
  int64_t slice;

  __device__ explicit Place(const DeltaRuleRows& rows)
      : index(blockIdx.x / rows.num_value_heads),
        head(blockIdx.x % rows.num_value_heads),
        slice(blockIdx.y) {}
};

// Pointers to the columns of a head, at row 0.
struct Columns {
  const Bf16* q;
  const Bf16* k;
  const Bf16* v;
  int64_t stride;

  __device__ Columns(const DeltaRuleRows& rows, const Place& place) {
    const int64_t keys = rows.num_key_heads * kKeys;
    const int64_t group = rows.num_value_heads / rows.num_key_heads;
    const auto* mixed = static_cast<const Bf16*>(rows.mixed_TW);
    stride = 2 * keys + rows.num_value_heads * rows.value_features;
    q = mixed + place.head / group * kKeys;
    k = q + keys;
    v = mixed + 2 * keys + place.head * rows.value_features +
        place.slice * kSlice;
  }
};

__device__ inline const Bf16* Bf16Of(const void* data) {
  return static_cast<const Bf16*>(data);
}
__device__ inline Bf16* Bf16Of(void* data) { return static_cast<Bf16*>(data); }

// Returns the place of a row of W or of the inverse, in [H, T, C].
__device__ inline int64_t ScoresAt(const DeltaScores& scores, int64_t head,
                                   int64_t row) {
  return (head * scores.num_rows + row) * kRows;
}

// Returns the block's slice of a state [K, V] of its head, or null for -1.
template <typename T>
__device__ T* StateOf(T* states_SHKV, int64_t index, const DeltaRuleRows& rows,
                      const Place& place) {
  if (index < 0) return nullptr;
  return states_SHKV +
         (index * rows.num_value_heads + place.head) * kKeys *
             rows.value_features +
         place.slice * kSlice;
}

// Fills the sums with the state at `from`.
__device__ inline void LoadState(const float* from, int stride,
                                 StateOfRows::Sums* sums) {
  ChangePairs<StateOfRows>(sums, [&](int k, int v, float* low, float* high) {
    const auto pair = LoadPack<2>(from + k * stride + v);
    *low = pair[0];
    *high = pair[1];
  });
}

__device__ inline void ScaleState(float factor, StateOfRows::Sums* sums) {
  ChangePairs<StateOfRows>(sums, [&](int, int, float* low, float* high) {
    *low *= factor;
    *high *= factor;
  });
}

// Everything of a block that does not change from chunk to chunk.
struct Block {
  __device__ Block(const DeltaRuleRows& of_rows, const DeltaScores& of_scores)
      : rows(of_rows),
        scores(of_scores),
        place(of_rows),
        columns(of_rows, place),
        row_stride(rows.num_value_heads * rows.value_features),
        column(place.head * rows.value_features + place.slice * kSlice) {}

  DeltaRuleRows rows;
  DeltaScores scores;
  Place place;
  Columns columns;
  int64_t row_stride;
  int64_t column;
};

// The same of the backward pass.
struct GradientBlock : Block {
  __device__ GradientBlock(const DeltaRuleRows& of_rows,
                           const DeltaScores& of_scores,
                           const DeltaChunksGradient& of_gradient)
      : Block(of_rows, of_scores), gradient(of_gradient) {}

  // The place of a row's element in dbeta and dg.
  __device__ int64_t Gate(int64_t row) const {
    return (place.slice * scores.num_rows + row) * rows.num_value_heads +
           place.head;
  }

  DeltaChunksGradient gradient;
};

// Starts a kernel with blocks for `count` trees or chunks, for all value heads
// and `slices` slices of their features.
template <typename Memory, typename... Parameters, typename... Arguments>
cudaError_t LaunchBlocks(void (*kernel)(DeltaRuleRows, Parameters...),
                         int64_t count, int64_t slices, cudaStream_t stream,
                         const DeltaRuleRows& rows, Arguments... arguments) {
  static_assert(sizeof(Memory) <= kBlockSharedBytes);
  if (!TakesDeltaChunks(rows.key_features, rows.value_features)) {
    return cudaErrorInvalidValue;
  }
  if (count == 0) return cudaSuccess;
  return LaunchShaped(kernel,
                      {.grid_x = count * rows.num_value_heads,
                       .grid_y = slices,
                       .threads = kThreads,
                       .shared_bytes = sizeof(Memory)},
                      stream, rows, arguments...);
}

}  // namespace weft::kernels::cuda::delta

#endif  // WEFT_KERNELS_CUDA_DELTA_DELTA_CHUNK_CUH_
