// Copies an operand of a tensor-core product from global to shared memory, and
// loads the fragments of a warp from there.
//
// Legend: an operand has an outer index (a row or a column of the product) and
// a depth index, over which the product sums. Either index may be the row index
// in memory.
#ifndef WEFT_KERNELS_CUDA_OPERAND_TILE_CUH_
#define WEFT_KERNELS_CUDA_OPERAND_TILE_CUH_

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft::kernels::cuda {

using Bf16 = __nv_bfloat16;

// The number of elements in a chunk: 16 bytes, the widest access.
inline constexpr int kChunk = 8;
// The side of the square part of an operand that one ldmatrix loads.
inline constexpr int kFragment = 16;

// A row-major matrix in global memory. OperandTile::Copy reads elements outside
// the matrix as 0.
struct MatrixView {
  const Bf16* data;
  int64_t stride;
  int num_rows;
  int num_columns;

  __device__ MatrixView Shifted(int row, int column) const {
    return {data + row * stride + column, stride, num_rows - row,
            num_columns - column};
  }
  // Returns how many elements of the chunk at `column` are inside the matrix.
  __device__ int ChunkSize(int column) const {
    const int count = num_columns - column;
    return count < 0 ? 0 : count < kChunk ? count : kChunk;
  }
  // Returns whether each chunk can be read with one 16-byte access.
  __device__ bool IsAligned() const {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kChunk == 0;
  }
};

// The part of one operand that a block of kThreads threads multiplies in one
// step along the depth. It is in shared memory.
template <int kOuter, int kDepth, bool kDepthIsRows, int kThreads>
struct OperandTile {
  static constexpr int kRows = kDepthIsRows ? kDepth : kOuter;
  static constexpr int kRowChunks = (kDepthIsRows ? kOuter : kDepth) / kChunk;
  static constexpr int kChunks = kRows * kRowChunks;
  static constexpr int kLineChunks = 8;  // This many chunks fill all banks.

  uint4 chunks[kChunks];

  // Returns the index of a chunk in `chunks`. The order of a row's chunks is
  // permuted, so that in eight consecutive rows the chunks of one column are in
  // different banks.
  static __device__ int Place(int row, int chunk) {
    if constexpr (kRowChunks >= kLineChunks) {
      return row * kRowChunks + (chunk ^ row % kLineChunks);
    } else {
      constexpr int kRowsPerLine = kLineChunks / kRowChunks;
      return row * kRowChunks + (chunk ^ row / kRowsPerLine % kRowChunks);
    }
  }

  __device__ const uint4& At(int row, int chunk) const {
    return chunks[Place(row, chunk)];
  }

  // Fills the tile with the matrix's first rows and columns. Elements outside
  // the matrix become 0. If is_aligned (matrix.IsAligned()), the copy is
  // asynchronous. All threads of the block call it.
  __device__ void Copy(const MatrixView& matrix, bool is_aligned) {
    // All chunks that a thread copies are in the same columns.
    constexpr int kRowStep = kThreads / kRowChunks;
    static_assert(kThreads % kRowChunks == 0);
    const auto first_row = static_cast<int>(threadIdx.x / kRowChunks);
    const auto chunk = static_cast<int>(threadIdx.x % kRowChunks);
    const int count = matrix.ChunkSize(chunk * kChunk);
    if (is_aligned) {
      const Bf16* from =
          matrix.data + first_row * matrix.stride + chunk * kChunk;
#pragma unroll
      for (int j = 0; j < (kRows + kRowStep - 1) / kRowStep; ++j) {
        const int row = first_row + j * kRowStep;
        if (kRows % kRowStep != 0 && row >= kRows) break;
        const bool is_there = row < matrix.num_rows && count > 0;
        CopyAsync(is_there ? from + j * kRowStep * matrix.stride : matrix.data,
                  is_there ? count * static_cast<int>(sizeof(Bf16)) : 0,
                  &chunks[Place(row, chunk)]);
      }
      return;
    }
#pragma unroll 1
    for (int row = first_row; row < kRows; row += kRowStep) {
      const Bf16* from = matrix.data + row * matrix.stride + chunk * kChunk;
      auto* to = reinterpret_cast<Bf16*>(&chunks[Place(row, chunk)]);
#pragma unroll 1
      for (int e = 0; e < kChunk; ++e) {
        to[e] = row < matrix.num_rows && e < count ? from[e] : Bf16{};
      }
    }
  }

  // Loads the fragment at (outer, depth): MultiplyAdd's left operand if
  // kIsLeft, otherwise its right operands at `outer` and at outer + 8.
  template <bool kIsLeft>
  __device__ void Load(int outer, int depth, unsigned (&fragments)[4]) const {
    const auto lane = static_cast<int>(threadIdx.x % kWarp);
    const int matrix = lane / 8;
    const int outer_shift = (kIsLeft ? matrix % 2 : matrix / 2) * 8;
    const int depth_shift = (kIsLeft ? matrix / 2 : matrix % 2) * 8;
    const int chunk_shift = kDepthIsRows ? outer_shift : depth_shift;
    const int row =
        (kDepthIsRows ? depth + depth_shift : outer + outer_shift) + lane % 8;
    const int chunk = ((kDepthIsRows ? outer : depth) + chunk_shift) / kChunk;
    const auto* from =
        reinterpret_cast<const Bf16*>(&chunks[Place(row, chunk)]);
    if constexpr (kDepthIsRows) {
      LoadMatricesTransposed(from, fragments);
    } else {
      LoadMatrices(from, fragments);
    }
  }
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_OPERAND_TILE_CUH_
