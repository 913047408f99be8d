// The scores of one step of a warp in paged attention: products of 16 keys with
// up to 8 query heads. Legend: as in paged_attention_pieces.cuh.
#ifndef WEFT_KERNELS_CUDA_PAGED_ATTENTION_KEYS_CUH_
#define WEFT_KERNELS_CUDA_PAGED_ATTENTION_KEYS_CUH_

#include "kernels/cuda/paged_attention_pieces.cuh"

namespace weft::kernels::cuda {

// The query heads of a block, in the order in which lanes read them.
template <typename T, int kChunks>
struct Query {
  Words parts[kParts<T>][2 * kChunks][kWarp];
};

// Loads the query heads. Writes zeros beyond `num_heads` and beyond `features`.
// All threads of the block call it, and a barrier must follow.
template <typename T, int kChunks>
__device__ void LoadQuery(const T* q_HC, int num_heads, int features,
                          Query<T, kChunks>* query) {
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kChunks * kWarp;
       i += static_cast<int>(blockDim.x)) {
    const int head = i % kWarp / 4;
    const int first = i / kWarp * (kFeatureChunk / 2) + i % 4 * kPiece;
    Words parts[kParts<T>];
    SplitPiece(LoadPiece<T, false>(q_HC + head * features + first, first,
                                   head < num_heads ? features : 0, false),
               parts);
#pragma unroll
    for (int part = 0; part < kParts<T>; ++part) {
      query->parts[part][i / kWarp][i % kWarp] = parts[part];
    }
  }
}

// The keys of one step. `slots` is one slot per lane: lanes i and i + 16 pass
// the slot of the step's token i.
template <typename T, int kChunks, bool kWide>
struct Keys {
  const T* rows[2];
  int features;
  Piece<T> pieces[2 * kChunks][2];

  static __device__ int FirstFeature() { return Lane() % 4 * kPiece; }
  __device__ void LoadPieces(int j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = j * (kFeatureChunk / 2);
      pieces[j][i] =
          LoadPiece<T, kWide>(rows[i] + first, first + FirstFeature(), features,
                              j / 2 + 1 < kChunks);
    }
  }
  __device__ void Load(const LaneRows<T>& lane_rows, unsigned slots) {
    features = lane_rows.features;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = lane_rows.Of(__shfl_sync(kAllLanes, slots, Lane() / 4 + 8 * i));
    }
    if constexpr (kAtOnce<T, kChunks, kWide>) {
#pragma unroll
      for (int j = 0; j < 2 * kChunks; ++j) LoadPieces(j);
    }
  }

  // Sets scores[0] and scores[1] to the products of token g's key with heads
  // 2 t and 2 t + 1. Sets scores[2] and scores[3] likewise for token g + 8.
  __device__ void Score(const Query<T, kChunks>& query, float (&scores)[4]) {
    float other[4] = {};
#pragma unroll
    for (float& score : scores) score = 0;
#pragma unroll
    for (int j = 0; j < 2 * kChunks; ++j) {
      if constexpr (!kAtOnce<T, kChunks, kWide>) LoadPieces(j);
      Words parts[2][kParts<T>];
      SplitPiece(pieces[j][0], parts[0]);
      SplitPiece(pieces[j][1], parts[1]);
#pragma unroll
      for (int part = 0; part < kParts<T>; ++part) {
        const Words q = query.parts[part][j][Lane()];
#pragma unroll
        for (int i = 0; i < kParts<T> - part; ++i) {
          const Words& low = parts[0][i];
          const Words& high = parts[1][i];
          MultiplyAdd({low.at[0], high.at[0], low.at[1], high.at[1]},
                      {q.at[0], q.at[1]}, scores);
          MultiplyAdd({low.at[2], high.at[2], low.at[3], high.at[3]},
                      {q.at[2], q.at[3]}, other);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] += other[i];
  }
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_PAGED_ATTENTION_KEYS_CUH_
