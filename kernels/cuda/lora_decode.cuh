// Functions that the kernels of lora_decode.h share: tiles of features, the
// sums of S, and the deferred norm.
#ifndef WEFT_KERNELS_CUDA_LORA_DECODE_CUH_
#define WEFT_KERNELS_CUDA_LORA_DECODE_CUH_

#include <initializer_list>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora_decode.h"
#include "kernels/cuda/lora_decode_items.cuh"
#include "kernels/cuda/lora_few_expand.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda::few_rows {

// The number of warps in a block of RunLoraHeads or RunLoraResidual. Each warp
// computes kWarpFeatures of the kSpan features of an item.
inline constexpr int kDecodeWarps = 8;
inline constexpr unsigned kDecodeThreads = kDecodeWarps * kWarp;
inline constexpr int kSpan = kDecodeWarps * kWarpFeatures;

// Returns the number of tiles of kFeatures features. Kernels call it instead of
// LoraResidualParts and LoraGateParts, which are host functions.
template <int64_t kFeatures>
__host__ __device__ int TilesOf(int64_t features) {
  return static_cast<int>((features + kFeatures - 1) / kFeatures);
}
// Returns the index after the last feature of a tile.
template <int64_t kFeatures>
__device__ int EndOf(int tile, int64_t features) {
  const int64_t end = (tile + 1) * kFeatures;
  return static_cast<int>(end < features ? end : features);
}

// Returns whether every row of every matrix begins at a multiple of 16 bytes. A
// row has `features` elements. A null matrix counts as aligned. The host
// computes this, because in a kernel it would take a register.
inline bool RowsAreAligned(std::initializer_list<const void*> rows,
                           int64_t features) {
  bool are = true;
  for (const void* data : rows) are = are && IsWide<Bf16>(data, features);
  return are;
}

// Returns the first of the lane's 8 features. The features of the item begin at
// `first`.
__device__ inline int OwnFeature(int first) {
  return first + WarpIndex() * kWarpFeatures + Lane() % 4 * kChunk;
}
// Returns the lane's upper row (lower = 0) or lower row (lower = 1), as an
// index in the entry.
__device__ inline int OwnRow(int lower) {
  return Lane() / 4 + lower * kColumns;
}

// Returns data + offset, or null if `data` is null.
template <typename T>
__device__ T* Behind(T* data, int64_t offset) {
  return data == nullptr ? nullptr : data + offset;
}

// Returns the sum over the four lanes that have the same two rows.
__device__ inline float SumOverRow(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// A lane adds parts l, l + 4 and so on of a row's sum of squares, where l is
// Lane() % 4. Squares holds the first kSquares of these parts. Parts that do
// not exist are 0.
inline constexpr int kSquares = 4;
struct Squares {
  float values[kSquares];
};

// Loads the lane's Squares of a row. They are 0 if the row does not exist.
__device__ inline Squares LoadSquares(const DeferredNorm& norm, int64_t row,
                                      bool exists) {
  Squares squares = {};
  if (norm.squares_TP == nullptr || !exists) return squares;
  const int parts = TilesOf<kLoraResidualFeatures>(norm.hidden);
#pragma unroll
  for (int k = 0; k < kSquares; ++k) {
    const int i = Lane() % 4 + k * 4;
    if (i < parts) squares.values[k] = norm.squares_TP[row * parts + i];
  }
  return squares;
}

// Returns a row's factor 1 / rms(x); see DeferredNorm. `loaded` is the result
// of LoadSquares for the row. If the row does not exist, the result is
// meaningless. All lanes of the warp call it.
__device__ inline float FactorOf(const DeferredNorm& norm, int64_t row,
                                 bool exists, const Squares& loaded) {
  if (norm.squares_TP == nullptr) return 1;
  const int parts = TilesOf<kLoraResidualFeatures>(norm.hidden);
  const float* squares = norm.squares_TP + row * parts;
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kSquares; ++k) sum += loaded.values[k];
  for (int i = Lane() % 4 + kSquares * 4; exists && i < parts; i += 4) {
    sum += squares[i];
  }
  return rsqrtf(SumOverRow(sum) / static_cast<float>(norm.hidden) + norm.eps);
}

// Returns whether 16-byte loads can read the rows of A, which have `inputs`
// features. Returns true for rank 0, because nothing is read then.
__device__ inline bool AIsAligned(const LoraFewRows& rows, const LoraMatrix& a,
                                  int64_t inputs) {
  return a.rank == 0 ||
         IsAligned(static_cast<const Bf16*>(rows.weights) + a.offset, inputs);
}
__device__ inline bool BIsAligned(const LoraFewRows& rows,
                                  const LoraMatrix& b) {
  return AIsAligned(rows, b, b.rank);
}

// Waits for earlier launches. Then fills slab k with the entry's S for the k-th
// of kSides projections. All threads of the block call it, and all see the
// slabs afterwards. Before this call, kernels read only the table and the
// adapters' weights, which no launch of a decode step writes.
template <int kSides>
__device__ void FillSlabs(const LoraParts& parts, const LoraFewRows& rows,
                          const LoraMatrix* matrices, Slab (&slabs)[kSides]) {
  WaitForEarlierLaunches();
#pragma unroll
  for (int k = 0; k < kSides; ++k) {
    FillSlab<kSlabRanks>(
        parts, rows, matrices[k], 0, [](int, int, Bf16) {}, &slabs[k]);
  }
  __syncthreads();
}

}  // namespace weft::kernels::cuda::few_rows

#endif  // WEFT_KERNELS_CUDA_LORA_DECODE_CUH_
