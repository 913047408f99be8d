// Functions for the products in the kernels of lora_decode.h: they prefetch the
// matrices, expand S, and shrink rows that are in registers.
#ifndef WEFT_KERNELS_CUDA_LORA_DECODE_PRODUCTS_CUH_
#define WEFT_KERNELS_CUDA_LORA_DECODE_PRODUCTS_CUH_

#include "kernels/cuda/lora_decode.cuh"

namespace weft::kernels::cuda::few_rows {

// Prefetches B's rows of the features [first, end), but at most `lines` cache
// lines.
__device__ inline void PrefetchB(const LoraFewRows& rows, const LoraMatrix& b,
                                 int first, int end, int lines) {
  if (b.rank == 0) return;
  const int wanted = ((end - first) * b.rank + kLine - 1) / kLine;
  const int count = wanted < lines ? wanted : lines;
  const Bf16* from = static_cast<const Bf16*>(rows.weights) + b.offset +
                     static_cast<int64_t>(first) * b.rank;
  for (int i = static_cast<int>(threadIdx.x); i < count;
       i += static_cast<int>(blockDim.x)) {
    Prefetch(from + i * kLine);
  }
}

// Prefetches the features [first, end) of every rank of A, but at most `lines`
// cache lines. end - first is at most kFeatures.
template <int64_t kFeatures>
__device__ void PrefetchA(const LoraFewRows& rows, const LoraMatrix& a,
                          int64_t inputs, int first, int end, int lines) {
  constexpr int kPerRank = kFeatures / kLine;
  static_assert(kFeatures % kLine == 0);
  const int wanted = a.rank * kPerRank;
  const int count = wanted < lines ? wanted : lines;
  const Bf16* from = static_cast<const Bf16*>(rows.weights) + a.offset;
  for (int i = static_cast<int>(threadIdx.x); i < count;
       i += static_cast<int>(blockDim.x)) {
    const int feature = first + i % kPerRank * kLine;
    if (feature < end) Prefetch(from + i / kPerRank * inputs + feature);
  }
}

// Loads B's first step (LoadStep) for the warp's features, ahead of
// AddExpansion. `own` is the first of the lane's 8 features. Without kAligned,
// does nothing, because unaligned loads need more registers.
template <bool kAligned>
__device__ void LoadFirstStep(const LoraFewRows& rows, const LoraMatrix& b,
                              int features, int own, Chunk (&step)[kTiles]) {
  if constexpr (kAligned) {
    LoadStep<true>(rows, b, features, own - Lane() % 4 * kChunk, 0, step);
  }
}

// Adds S B^T to the warp's sums, for those of the warp's features that are
// below `features`. `own` is the first of the lane's 8 features, and `step` is
// the result of LoadFirstStep. With kAligned, the loads of a step overlap with
// the products of the step before.
template <bool kAligned>
__device__ void AddExpansion(const LoraFewRows& rows, const LoraMatrix& b,
                             const Slab& slab, int features, int own,
                             Chunk (&step)[kTiles], WarpSums& sums) {
  const int first = own - Lane() % 4 * kChunk;
  for (int rank = 0; rank < b.rank; rank += kDepth) {
    Chunk next[kTiles];
    LoadStep<kAligned>(rows, b, features, first, rank + (kAligned ? kDepth : 0),
                       kAligned ? next : step);
    MultiplyStep(slab, rank / kDepth, step, sums);
    if constexpr (kAligned) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) step[j] = next[j];
    }
  }
}

// In one round, a warp multiplies kRoundRanks ranks of A. A Round has one
// lane's elements of these ranks.
inline constexpr int kRoundTiles = 4;
inline constexpr int kRoundRanks = kRoundTiles * kColumns;
static_assert(kRoundRanks == kDepth, "HasLaterRanks knows only kDepth");
using Round = Chunk[kRoundTiles];

// Loads the kRoundRanks ranks of A from `first_rank` on, at the lane's 8
// features from `own` on. Ranks and features beyond A are 0.
template <bool kAligned>
__device__ void LoadRound(const LoraFewRows& rows, const LoraMatrix& a,
                          int inputs, int own, int first_rank, Round& round) {
  if (a.rank == 0) return;  // Rows without an adapter have no weights.
  const Bf16* from = static_cast<const Bf16*>(rows.weights) + a.offset;
#pragma unroll
  for (int j = 0; j < kRoundTiles; ++j) {
    const int rank = first_rank + j * kColumns + Lane() / 4;
    round[j] = Load<kAligned>(from + rank * inputs, own, inputs, rank < a.rank);
  }
}

// The sums of kWarps warps for one round. Rows are padded, so that adjacent
// rows start in different banks. With more padding, the sums of 16 warps and
// two slabs would exceed 48 KB.
template <int kWarps>
struct RoundSums {
  float sums[kWarps][kRows][kRoundRanks + kQuad];
};

// Writes part `part` of scale x A^T for the entry's rows. x is in registers: it
// has the lane's two rows at the 8 features from `own` on. `round` holds A's
// first round at the same features. All threads of the block call it.
template <bool kAligned, int kWarps>
__device__ void WritePart(const LoraParts& parts, const LoraFewRows& rows,
                          const LoraMatrix& a, int inputs, int own, int part,
                          const Chunk (&x)[2], Round& round,
                          RoundSums<kWarps>* memory) {
  for (int first = 0; first < a.rank; first += kRoundRanks) {
    WarpSums sums = {};
#pragma unroll
    for (int j = 0; j < kRoundTiles; ++j) {
      Multiply(x[0], x[1], round[j], sums[j]);
    }
    // Loads the next round before the warps' sums are added up, so that both
    // overlap.
    LoadRound<kAligned>(rows, a, inputs, own, first + kRoundRanks, round);
#pragma unroll
    for (int j = 0; j < kRoundTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        memory->sums[WarpIndex()][OwnRow(i / 2)]
                    [j * kColumns + Lane() % 4 * 2 + i % 2] = sums[j][i];
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < rows.num_rows * kRoundRanks;
         i += kWarps * kWarp) {
      const int row = i / kRoundRanks;
      const int rank = i % kRoundRanks;
      if (first + rank >= a.rank) continue;
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        sum += memory->sums[warp][row][rank];
      }
      PartOf(parts, rows, row, part)[a.column + first + rank] = a.scale * sum;
    }
    // All threads wait here, because the next round overwrites these sums.
    __syncthreads();
  }
}

}  // namespace weft::kernels::cuda::few_rows

#endif  // WEFT_KERNELS_CUDA_LORA_DECODE_PRODUCTS_CUH_
