// Functions for the products in the kernels of lora_decode.h: they prefetch the
// matrices, expand S, and shrink rows that are in registers.
#ifndef WEFT_KERNELS_CUDA_LORA_DECODE_PRODUCTS_CUH_
#define WEFT_KERNELS_CUDA_LORA_DECODE_PRODUCTS_CUH_

#include "kernels/cuda/lora_decode.cuh"

namespace weft::kernels::cuda::few_rows {

// Prefetches B's rows of the features [first, end), but at most `lines` cache
// lines for each thread.
__device__ inline void PrefetchB(const LoraFewRows& rows, const LoraMatrix& b,
                                 int first, int end, int lines) {
  const int count = (end - first) * b.rank;
  if (count == 0) return;
  const Bf16* from = static_cast<const Bf16*>(rows.weights) + b.offset +
                     static_cast<int64_t>(first) * b.rank;
  for (int i = 0; i < lines; ++i) {
    const int at =
        (static_cast<int>(threadIdx.x) + i * static_cast<int>(kDecodeThreads)) *
        kLine;
    if (at >= count) break;
    Prefetch(from + at);
  }
}

// Prefetches A's features [first, end) of every rank, but at most `lines` cache
// lines for each thread.
__device__ inline void PrefetchA(const LoraFewRows& rows, const LoraMatrix& a,
                                 int64_t inputs, int first, int end,
                                 int lines) {
  if (a.rank == 0) return;
  const int per_rank = (end - first + kLine - 1) / kLine;
  const Bf16* from = static_cast<const Bf16*>(rows.weights) + a.offset + first;
  for (int i = 0; i < lines; ++i) {
    const int at =
        static_cast<int>(threadIdx.x) + i * static_cast<int>(kDecodeThreads);
    if (at >= a.rank * per_rank) break;
    Prefetch(from + at / per_rank * inputs + at % per_rank * kLine);
  }
}

// Adds S B^T to the warp's sums, for those of the warp's features that are
// below `features`. `own` is the first of the lane's 8 features. With kAhead,
// the loads of a step overlap with the products of the step before; this takes
// more registers.
template <bool kAligned, bool kAhead>
__device__ void AddExpansion(const LoraFewRows& rows, const LoraMatrix& matrix,
                             const Slab& slab, int features, int own,
                             WarpSums& sums) {
  if (matrix.rank == 0) return;
  const int first = own - Lane() % 4 * kChunk;
  Chunk b[kTiles];
  if constexpr (kAhead) {
    LoadStep<kAligned>(rows, matrix, features, first, 0, b);
  }
  for (int rank = 0; rank < matrix.rank; rank += kDepth) {
    Chunk next[kTiles];
    LoadStep<kAligned>(rows, matrix, features, first,
                       rank + (kAhead ? kDepth : 0), kAhead ? next : b);
    MultiplyStep(slab, rank / kDepth, b, sums);
    if constexpr (kAhead) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) b[j] = next[j];
    }
  }
}

// A warp multiplies kRoundRanks ranks of A at a time, which is a round. A Round
// has one lane's elements of these ranks.
inline constexpr int kRoundTiles = 4;
inline constexpr int kRoundRanks = kRoundTiles * kColumns;
using Round = Chunk[kRoundTiles];

// Loads the kRoundRanks ranks of A from `first_rank` on, at the lane's 8
// features from `own` on. Ranks and features beyond A are 0.
template <bool kAligned>
__device__ void LoadRound(const LoraFewRows& rows, const LoraMatrix& a,
                          int inputs, int own, int first_rank, Round& round) {
  if (a.rank == 0) return;
#pragma unroll
  for (int j = 0; j < kRoundTiles; ++j) {
    const int64_t rank = first_rank + j * kColumns + Lane() / 4;
    const Bf16* row =
        static_cast<const Bf16*>(rows.weights) + a.offset + rank * inputs;
    round[j] = Load<kAligned>(row, own, inputs, rank < a.rank);
  }
}

// The sums of all warps for one round. Rows are padded, so that they start in
// different banks.
struct RoundSums {
  float sums[kDecodeWarps][kRows][kRoundRanks + kColumns];
};

// Writes part `part` of scale x A^T for the entry's rows. x is in registers:
// x[s] has the lane's two rows at the 8 features from own + s * kSpan on.
// round[s] holds A's first round at the same features. All threads of the block
// call it.
template <bool kAligned, int kSpans>
__device__ void WritePart(const LoraParts& parts, const LoraFewRows& rows,
                          const LoraMatrix& a, int inputs, int own, int part,
                          const Chunk (&x)[kSpans][2], Round (&round)[kSpans],
                          RoundSums* memory) {
  for (int first = 0; first < a.rank; first += kRoundRanks) {
    WarpSums sums = {};
#pragma unroll
    for (int s = 0; s < kSpans; ++s) {
#pragma unroll
      for (int j = 0; j < kRoundTiles; ++j) {
        Multiply(x[s][0], x[s][1], round[s][j], sums[j]);
      }
    }
    // Loads the next round before the warps' sums are added up, so that both
    // overlap.
#pragma unroll
    for (int s = 0; s < kSpans; ++s) {
      LoadRound<kAligned>(rows, a, inputs, own + s * kSpan, first + kRoundRanks,
                          round[s]);
    }
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
         i += static_cast<int>(kDecodeThreads)) {
      const int row = i / kRoundRanks;
      const int rank = i % kRoundRanks;
      if (first + rank >= a.rank) continue;
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < kDecodeWarps; ++warp) {
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
