// What the forward and the backward pass of the gated delta rule in chunks
// share. A block computes kSlice value features of one head of one tree, chunk
// after chunk. All columns of a state are independent of each other, and the
// gradients of keys and gates are sums over them.
//
// Legend: that of gated_delta.h. Rows beyond a chunk's end have q, k, v and
// beta 0 and g 0, so they change nothing.
#ifndef WEFT_KERNELS_CUDA_DELTA_DELTA_CHUNK_CUH_
#define WEFT_KERNELS_CUDA_DELTA_DELTA_CHUNK_CUH_

#include "kernels/cuda/delta/delta_tile.cuh"
#include "kernels/cuda/delta/gated_delta.h"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda::delta {

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
    double sum = own[1];
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const double other = __shfl_up_sync(kAllLanes, sum, offset);
      if (Lane() >= offset) sum += other;
    }
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

// The block's head and slice of value features.
struct Place {
  int64_t tree;
  int64_t head;
  int64_t slice;

  __device__ explicit Place(const DeltaRuleRows& rows)
      : tree(blockIdx.x / rows.num_value_heads),
        head(blockIdx.x % rows.num_value_heads),
        slice(blockIdx.y) {}
};

// Pointers to the columns of a head, at row 0.
struct Columns {
  const float* q;
  const float* k;
  const float* v;
  int stride;

  __device__ Columns(const DeltaRuleRows& rows, const Place& place) {
    const int64_t keys = rows.num_key_heads * kKeys;
    const int64_t group = rows.num_value_heads / rows.num_key_heads;
    stride =
        static_cast<int>(2 * keys + rows.num_value_heads * rows.value_features);
    q = rows.mixed_TW + place.head / group * kKeys;
    k = q + keys;
    v = rows.mixed_TW + 2 * keys + place.head * rows.value_features +
        place.slice * kSlice;
  }
};

// Writes W = decay q k^T to `w`, and decay k k^T below the diagonal, and 0
// elsewhere, to `kk`.
__device__ inline void FillScores(const KeyRows& q, const KeyRows& k,
                                  const Gates& gates, Scores* w,
                                  float (*kk)[kRows + 1]) {
  ScoresOfKeys::Sums sums = {};
  ScoresOfKeys::Multiply(q, k, &sums);
  ScoresOfKeys::ForPairs(sums, [&](int row, int column, float a, float b) {
    w->Set(row, column, a * gates.Decay(row, column),
           b * gates.Decay(row, column + 1));
  });
  sums = {};
  ScoresOfKeys::Multiply(k, k, &sums);
  ScoresOfKeys::ForPairs(sums, [&](int row, int column, float a, float b) {
    kk[row][column] = column < row ? a * gates.Decay(row, column) : 0.0F;
    kk[row][column + 1] =
        column + 1 < row ? b * gates.Decay(row, column + 1) : 0.0F;
  });
}

// Replaces x by (I + diag(beta) kk)^-1 x, or by the product with the transposed
// inverse. Four lanes share a column.
template <bool kTransposed>
__device__ void Solve(const float (*kk)[kRows + 1], const Gates& gates,
                      float (*x)[kStride]) {
  const int column = static_cast<int>(threadIdx.x) / 4;
  const int part = static_cast<int>(threadIdx.x) % 4;
  for (int n = 1; n < kRows; ++n) {
    const int t = kTransposed ? kRows - 1 - n : n;
    float sum = 0;
#pragma unroll 2
    for (int j = part; j < n; j += 4) {
      const int i = kTransposed ? kRows - 1 - j : j;
      sum += kTransposed ? gates.beta[i] * kk[i][t] * x[i][column]
                         : gates.beta[t] * kk[t][i] * x[i][column];
    }
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    if (part == 0) x[t][column] -= sum;
    __syncwarp();
  }
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

// Fills the sums with `factor` times the state at `from`.
__device__ inline void LoadState(const float* from, int stride, float factor,
                                 StateOfRows::Sums* sums) {
  ChangePairs<StateOfRows>(sums, [&](int k, int v, float* low, float* high) {
    const auto pair = LoadPack<2>(from + k * stride + v);
    *low = factor * pair[0];
    *high = factor * pair[1];
  });
}

}  // namespace weft::kernels::cuda::delta

#endif  // WEFT_KERNELS_CUDA_DELTA_DELTA_CHUNK_CUH_
