// The expansion of few rows: the sums of S, and its products with B.
#ifndef WEFT_KERNELS_CUDA_LORA_FEW_EXPAND_CUH_
#define WEFT_KERNELS_CUDA_LORA_FEW_EXPAND_CUH_

#include "kernels/cuda/lora_few_rows.cuh"

namespace weft::kernels::cuda::few_rows {

// The number of adjacent products of a warp, chosen so that a lane has 8
// adjacent features of y.
inline constexpr int kTiles = 4;
inline constexpr int kWarpFeatures = kTiles * kColumns;
using WarpSums = float[kTiles][4];

__device__ inline Bf16 Rounded(float x) { return __float2bfloat16_rn(x); }
__device__ inline uint16_t BitsOf(Bf16 x) {
  uint16_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Four ranks of one row of S, with zeros beyond the matrix.
inline constexpr int kQuad = 4;
union Quad {
  uint4 whole;
  float values[kQuad];
};

// So many adjacent lanes share a sum: lane l adds the parts l, l + kSumLanes
// and so on in order, of which it loads kPartsAtOnce at once. Then the lanes add
// their sums.
inline constexpr int kSumLanes = 4;
inline constexpr int kPartsAtOnce = 4;

// All lanes of the warp call it. All lanes that share the sum get it.
__device__ inline Quad SumOfParts(const LoraParts& parts,
                                  const LoraFewRows& rows,
                                  const LoraMatrix& matrix, int row, int rank) {
  Quad sum = {};
  // A part holds no ranks after the last matrix's last rank, rounded up to
  // four.
  const int count = rank < matrix.rank ? parts.count : 0;
  const int column = matrix.column + rank;
  const float* from = PartOf(parts, rows, row, 0) + column;
  const bool is_aligned = column % kQuad == 0;
  for (int first = Lane() % kSumLanes; first < count;
       first += kSumLanes * kPartsAtOnce) {
    Quad loaded[kPartsAtOnce];
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      loaded[i] = {};
      const int at = first + i * kSumLanes;
      if (at >= count) continue;
      const float* part = from + at * parts.stride;
      if (is_aligned) {
        loaded[i].whole = *reinterpret_cast<const uint4*>(part);
      } else {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          if (rank + j < matrix.rank) loaded[i].values[j] = part[j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) sum.values[j] += loaded[i].values[j];
    }
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    for (int offset = 1; offset < kSumLanes; offset *= 2) {
      sum.values[j] += __shfl_xor_sync(kAllLanes, sum.values[j], offset);
    }
    // Clears ranks beyond this matrix, which the wide load may have read.
    if (rank + j >= matrix.rank) sum.values[j] = 0;
  }
  return sum;
}

// Some ranks of S, in shared memory.
inline constexpr int kSlabRanks = 128;
struct Slab {
  // Padded, so that rows start at different banks.
  Chunk chunks[kRows][kSlabRanks / kChunk + 1];
};

// Fills the slab with the ranks of a projection from `first` on, up to a whole
// step. Rows outside the entry keep old values, and their results are not used.
// Calls keep(row, rank, value) for each rank of the projection.
template <typename Keep>
__device__ void FillSlab(const LoraParts& parts, const LoraFewRows& rows,
                         const LoraMatrix& matrix, int first, Keep keep,
                         Slab* slab) {
  const int left = matrix.rank - first;
  const int ranks = left < kSlabRanks ? left : kSlabRanks;
  const int quads = (ranks + kDepth - 1) / kDepth * (kDepth / kQuad);
  // Whole warps take part in a round, because a step has 32 lanes.
  static_assert(kDepth / kQuad * kSumLanes % kWarp == 0);
  for (int i = static_cast<int>(threadIdx.x);
       i < rows.num_rows * quads * kSumLanes;
       i += static_cast<int>(blockDim.x)) {
    const int row = i / kSumLanes / quads;
    const int rank = i / kSumLanes % quads * kQuad;
    const Quad sum = SumOfParts(parts, rows, matrix, row, first + rank);
    const int j = i % kSumLanes;
    static_assert(kSumLanes == kQuad);
    const Bf16 value = Rounded(sum.values[j]);
    slab->chunks[row][rank / kChunk].elements[rank % kChunk + j] =
        BitsOf(value);
    if (first + rank + j < matrix.rank) keep(row, first + rank + j, value);
  }
}

// Loads B of the warp's 32 features from `first` on, for one step of ranks.
// Column c of product j is the feature c / 2 * 8 + 2 j + c % 2.
template <bool kAligned>
__device__ void LoadStep(const LoraFewRows& rows, const LoraMatrix& matrix,
                         int features, int first, int rank,
                         Chunk (&b)[kTiles]) {
  const int g = Lane() / 4;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const int64_t feature = first + g / 2 * kChunk + 2 * j + g % 2;
    const Bf16* row = static_cast<const Bf16*>(rows.weights) + matrix.offset +
                      feature * matrix.rank;
    b[j] = Load<kAligned>(row, rank + Lane() % 4 * kChunk, matrix.rank,
                          feature < features);
  }
}

// Adds S B^T of an entry to the warp's sums, for kSides projections of
// `features` features each, of which the warp computes 32 from `first` on. All
// threads of the block call it. `holds` says that the slabs hold S from the
// previous call for this entry; S then is not summed again, if a slab holds all
// ranks. Loads the B of kSteps steps of ranks at once.
template <bool kAligned, int kSteps, int kSides, typename Keep>
__device__ void AddExpansion(const LoraParts& parts, const LoraFewRows& rows,
                             const LoraMatrix (&matrices)[kSides], int features,
                             int first, bool holds, Keep keep,
                             Slab (&slabs)[kSides], WarpSums (&sums)[kSides]) {
  int most = 0;
#pragma unroll
  for (int k = 0; k < kSides; ++k) {
    most = matrices[k].rank > most ? matrices[k].rank : most;
  }
  const bool fills = !holds || most > kSlabRanks;
  for (int begin = 0; begin < most; begin += kSlabRanks) {
    for (int rank = begin; rank < most && rank < begin + kSlabRanks;
         rank += kSteps * kDepth) {
      Chunk b[kSides][kSteps][kTiles];
#pragma unroll
      for (int k = 0; k < kSides; ++k) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          LoadStep<kAligned>(rows, matrices[k], features, first,
                             rank + i * kDepth, b[k][i]);
        }
      }
      // The first loads overlap with the sums.
      if (fills && rank == begin) {
#pragma unroll
        for (int k = 0; k < kSides; ++k) {
          FillSlab(parts, rows, matrices[k], begin, keep, &slabs[k]);
        }
        __syncthreads();
      }
#pragma unroll
      for (int k = 0; k < kSides; ++k) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          if (rank + i * kDepth >= matrices[k].rank) break;
          const int chunk = (rank - begin + i * kDepth) / kChunk + Lane() % 4;
          const Chunk upper = slabs[k].chunks[Lane() / 4][chunk];
          const Chunk lower = slabs[k].chunks[Lane() / 4 + kColumns][chunk];
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            Multiply(upper, lower, b[k][i][j], sums[k][j]);
          }
        }
      }
    }
    // The next slab overwrites this one, so all threads wait here.
    if (fills) __syncthreads();
  }
}

}  // namespace weft::kernels::cuda::few_rows

#endif  // WEFT_KERNELS_CUDA_LORA_FEW_EXPAND_CUH_
