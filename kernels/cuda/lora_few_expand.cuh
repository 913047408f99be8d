// Functions for the expansion in lora_few_rows.h and lora_decode.h: they put S
// into shared memory and multiply it with B.
#ifndef WEFT_KERNELS_CUDA_LORA_FEW_EXPAND_CUH_
#define WEFT_KERNELS_CUDA_LORA_FEW_EXPAND_CUH_

#include "kernels/cuda/lora_few_sums.cuh"

namespace weft::kernels::cuda::few_rows {

// The number of products of 16 rows and 8 features that a warp computes side by
// side. With 4 products, each lane has 8 adjacent features of y.
inline constexpr int kTiles = 4;
inline constexpr int kWarpFeatures = kTiles * kColumns;
using WarpSums = float[kTiles][4];

// Returns the lane's sum for the i-th of its 8 features, in its upper row
// (lower = 0) or in its lower row (lower = 1).
__device__ inline float SumOf(const WarpSums& sums, int lower, int i) {
  return sums[i / 2][2 * lower + i % 2];
}

// Some ranks of an entry's S as bf16, in shared memory.
inline constexpr int kSlabRanks = kLoraMaxDecodeRank;
struct Slab {
  // Rows are padded, so that they start in different banks.
  Chunk chunks[kRows][kSlabRanks / kChunk + 1];
};

// Fills the slab with at most kMost ranks of a projection's S, from `first` on.
// Pads the ranks with zeros to a whole step of kDepth ranks. Calls keep(row,
// rank, value) for each element of S that it reads. The slab's rows beyond the
// entry keep old values, and no kernel uses their products.
template <int kMost, typename Keep>
__device__ void FillSlab(const LoraParts& parts, const LoraFewRows& rows,
                         const LoraMatrix& matrix, int first, Keep keep,
                         Slab* slab) {
  const int left = matrix.rank - first;
  const int ranks = left < kMost ? left : kMost;
  const int quads = (ranks + kDepth - 1) / kDepth * (kDepth / kQuad);
  // SumOfParts needs all lanes. Each kDepth ranks of a row take a whole warp,
  // so the lanes of a warp leave the loop together.
  static_assert(kDepth / kQuad * kSumLanes % kWarp == 0 && kMost <= kSlabRanks);
  for (int i = static_cast<int>(threadIdx.x);
       i < rows.num_rows * quads * kSumLanes;
       i += static_cast<int>(blockDim.x)) {
    const int row = i / kSumLanes / quads;
    const int quad = i / kSumLanes % quads * kQuad;
    const int rank = quad + i % kSumLanes;
    const Bf16 value =
        Rounded(SumOfParts(parts, rows, matrix, row, first + quad));
    slab->chunks[row][rank / kChunk].elements[rank % kChunk] = BitsOf(value);
    if (first + rank < matrix.rank) keep(row, first + rank, value);
  }
}

// Loads one step of B, ranks [rank, rank + kDepth), for the warp's 32 features
// from `first` on. Column c of product j is feature first + c / 2 * 8 + 2 j + c
// % 2.
template <bool kAligned>
__device__ void LoadStep(const LoraFewRows& rows, const LoraMatrix& matrix,
                         int features, int first, int rank,
                         Chunk (&b)[kTiles]) {
  const int g = Lane() / 4;
  const Bf16* from = static_cast<const Bf16*>(rows.weights) + matrix.offset;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const int feature = first + g / 2 * kChunk + 2 * j + g % 2;
    b[j] =
        Load<kAligned>(from + feature * matrix.rank, rank + Lane() % 4 * kChunk,
                       matrix.rank, feature < features);
  }
}

// Multiplies step `step` of the slab's ranks by the same ranks of B, which are
// in `b`. Adds the product to the warp's sums.
__device__ inline void MultiplyStep(const Slab& slab, int step,
                                    const Chunk (&b)[kTiles], WarpSums& sums) {
  const int chunk = step * kDepth / kChunk + Lane() % 4;
  const Chunk upper = slab.chunks[Lane() / 4][chunk];
  const Chunk lower = slab.chunks[Lane() / 4 + kColumns][chunk];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) Multiply(upper, lower, b[j], sums[j]);
}

}  // namespace weft::kernels::cuda::few_rows

#endif  // WEFT_KERNELS_CUDA_LORA_FEW_EXPAND_CUH_
