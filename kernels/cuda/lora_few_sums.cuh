// Adds up the parts of S, for the kernels of lora_few_rows.h and lora_decode.h.
#ifndef WEFT_KERNELS_CUDA_LORA_FEW_SUMS_CUH_
#define WEFT_KERNELS_CUDA_LORA_FEW_SUMS_CUH_

#include "kernels/cuda/lora_few_rows.cuh"

namespace weft::kernels::cuda::few_rows {

// The values of four adjacent ranks in one row of S, in f32. They are from one
// part of S, or they are sums over parts.
inline constexpr int kQuad = 4;
union Quad {
  uint4 whole;
  float values[kQuad];
};

// kSumLanes adjacent lanes compute the sums of a quad of ranks. The l-th of
// these lanes adds the parts l, l + kSumLanes and so on, in order, and loads
// kPartsAtOnce of them at once. Then the lanes add their sums, and each lane
// keeps the sum of one rank.
inline constexpr int kSumLanes = kQuad;
inline constexpr int kPartsAtOnce = 4;

// Adds the lane's parts of a quad to `sum`. With kAligned, loads all ranks of
// the quad at once. Otherwise loads only its first `ranks` ranks. `from` is
// where the quad begins in part 0.
template <bool kAligned>
__device__ void AddParts(const LoraParts& parts, const float* from, int ranks,
                         Quad* sum) {
  const int stride = static_cast<int>(parts.stride);
  // Unrolling this loop would take registers away from the caller's operands.
#pragma unroll 1
  for (int first = Lane() % kSumLanes; first < parts.count;
       first += kSumLanes * kPartsAtOnce) {
    Quad loaded[kPartsAtOnce];
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      loaded[i] = {};
      const int part = first + i * kSumLanes;
      if (part >= parts.count) continue;
      if constexpr (kAligned) {
        loaded[i].whole = *reinterpret_cast<const uint4*>(from + part * stride);
      } else {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          if (j < ranks) loaded[i].values[j] = from[part * stride + j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) sum->values[j] += loaded[i].values[j];
    }
  }
}

// Returns the value of S, in f32, at row `row` of the entry and at the lane's
// rank. The quad begins at `rank`, and the lane's rank is
// rank + Lane() % kSumLanes. Returns 0 if the lane's rank is beyond the matrix.
// All lanes of the warp call it.
__device__ inline float SumOfParts(const LoraParts& parts,
                                   const LoraFewRows& rows,
                                   const LoraMatrix& matrix, int row,
                                   int rank) {
  Quad sum = {};
  // Loads nothing if the whole quad is beyond the matrix, because the quad may
  // then be beyond the end of the part.
  if (rank < matrix.rank) {
    const int column = matrix.column + rank;
    const float* from = PartOf(parts, rows, row, 0) + column;
    if (column % kQuad == 0) {
      AddParts<true>(parts, from, kQuad, &sum);
    } else {
      AddParts<false>(parts, from, matrix.rank - rank, &sum);
    }
  }
  float own = 0;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
#pragma unroll
    for (int offset = 1; offset < kSumLanes; offset *= 2) {
      sum.values[j] += __shfl_xor_sync(kAllLanes, sum.values[j], offset);
    }
    // Leaves out ranks beyond this matrix, because a 16-byte load may have read
    // them.
    if (Lane() % kSumLanes == j && rank + j < matrix.rank) own = sum.values[j];
  }
  return own;
}

}  // namespace weft::kernels::cuda::few_rows

#endif  // WEFT_KERNELS_CUDA_LORA_FEW_SUMS_CUH_
