// The sums of one step of a warp in paged attention: weights times values.
// Legend: as in paged_attention_pieces.cuh.
#ifndef WEFT_KERNELS_CUDA_PAGED_ATTENTION_VALUES_CUH_
#define WEFT_KERNELS_CUDA_PAGED_ATTENTION_VALUES_CUH_

#include "kernels/cuda/paged_attention_pieces.cuh"

namespace weft::kernels::cuda {

// The weights of the step's tokens, as the right operand of their product with
// the values.
template <typename T>
struct Weights {
  unsigned parts[kWeightParts<T>][2];

  // weights[2 i + j] is the weight of token g + 8 i for head 2 t + j.
  __device__ void Set(const float (&weights)[4]) {
    unsigned words[2][kWeightParts<T>];
    SplitPair(weights[0], weights[1], words[0]);
    SplitPair(weights[2], weights[3], words[1]);
#pragma unroll
    for (int part = 0; part < kWeightParts<T>; ++part) {
      parts[part][0] = Transpose8x8(words[0][part]);
      parts[part][1] = Transpose8x8(words[1][part]);
    }
  }
};

// The values of one step. `slots` is one slot per lane: lanes i and i + 16 pass
// the slot of the step's token i.
template <typename T, int kChunks, bool kWide>
struct Values {
  const T* rows[4];
  int features;
  Piece<T> pieces[kChunks][4];

  static __device__ int FirstFeature() { return Lane() / 4 * kPiece; }
  __device__ void LoadPieces(int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = j * kFeatureChunk;
      pieces[j][i] = LoadPiece<T, kWide>(
          rows[i] + first, first + FirstFeature(), features, j + 1 < kChunks);
    }
  }
  __device__ void Load(const LaneRows<T>& lane_rows, unsigned slots) {
    features = lane_rows.features;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = lane_rows.Of(
          __shfl_sync(kAllLanes, slots, Lane() % 4 * 2 + i % 2 + i / 2 * 8));
    }
    if constexpr (kAtOnce<T, kChunks, kWide>) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) LoadPieces(j);
    }
  }

  // Adds weights times values to `sums`. sums[j][m][2 i] and sums[j][m][2 i +
  // 1] belong to feature 64 j + 8 g + 2 m + i, for heads 2 t and 2 t + 1.
  __device__ void AddTo(const Weights<T>& weights,
                        float (&sums)[kChunks][kPiece / 2][4]) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if constexpr (!kAtOnce<T, kChunks, kWide>) LoadPieces(j);
      Words tokens[4][kParts<T>];
#pragma unroll
      for (int i = 0; i < 4; ++i) SplitPiece(pieces[j][i], tokens[i]);
#pragma unroll
      for (int m = 0; m < kPiece / 2; ++m) {
#pragma unroll
        for (int part = 0; part < kParts<T>; ++part) {
          // Returns a word with one feature of two tokens. A word of memory has
          // two features of one token.
          const auto pair = [&](int token, unsigned halves) {
            return __byte_perm(tokens[token][part].at[m],
                               tokens[token + 1][part].at[m], halves);
          };
          constexpr unsigned kLower = 0x5410;
          constexpr unsigned kUpper = 0x7632;
          const unsigned rows_of_features[4] = {
              pair(0, kLower), pair(0, kUpper), pair(2, kLower),
              pair(2, kUpper)};
#pragma unroll
          for (int i = 0; i < kWeightParts<T> - part; ++i) {
            MultiplyAdd(rows_of_features, weights.parts[i], sums[j][m]);
          }
        }
      }
    }
  }
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_PAGED_ATTENTION_VALUES_CUH_
