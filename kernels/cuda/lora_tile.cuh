// One output tile of the adapters' products on tensor cores: a block of
// kTileThreads threads adds up 64 x 64 sums over a depth, 32 at a time, while
// the next operands are already on their way to registers.
//
// Legend: an operand has an outer index (row or column of the tile) and the
// depth that is summed over. It lies in memory with either of them as rows.
#ifndef WEFT_KERNELS_CUDA_LORA_TILE_CUH_
#define WEFT_KERNELS_CUDA_LORA_TILE_CUH_

#include <mma.h>

#include <type_traits>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/lora_product.h"

namespace weft::kernels::cuda {

inline constexpr int kTileSide = 64;
inline constexpr int kTileDepth = 32;
inline constexpr unsigned kTileThreads = 128;
inline constexpr int64_t kTileFloats = kTileSide * kTileSide;

using Bf16 = __nv_bfloat16;

// A matrix in global memory, row-major; what is beyond its rows and columns
// reads as 0.
struct MatrixView {
  const Bf16* data;
  int64_t stride;
  int64_t num_rows;
  int64_t num_columns;

  __device__ MatrixView Shifted(int64_t row, int64_t column) const {
    return {data + row * stride + column, stride, num_rows - row,
            num_columns - column};
  }
};

// One operand of a step: kTileSide outer by kTileDepth deep, in shared memory.
template <bool kDepthIsRows>
struct OperandTile {
  static constexpr int kRows = kDepthIsRows ? kTileDepth : kTileSide;
  static constexpr int kColumns = kDepthIsRows ? kTileSide : kTileDepth;
  // Rows start at other banks; fragments stay aligned to 32 bytes.
  static constexpr int kStride = kColumns + 8;
  // 16 bytes, the widest load.
  static constexpr int kChunk = 8;
  static constexpr int kChunksPerRow = kColumns / kChunk;
  static constexpr int kChunksPerThread =
      kRows * kChunksPerRow / static_cast<int>(kTileThreads);

  // A thread's part of the tile, on its way.
  struct Registers {
    uint4 chunks[kChunksPerThread];
  };

  alignas(128) Bf16 data[kRows * kStride];

  static __device__ uint4 LoadChunk(const MatrixView& matrix, int row,
                                    int column) {
    union {
      uint4 whole;
      uint16_t elements[kChunk];
    } chunk = {};
    if (row >= matrix.num_rows) return chunk.whole;
    const Bf16* from = matrix.data + row * matrix.stride + column;
    const int64_t count = matrix.num_columns - column;
    if (count >= kChunk && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      return *reinterpret_cast<const uint4*>(from);
    }
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    for (int i = 0; i < kChunk && i < count; ++i) chunk.elements[i] = bits[i];
    return chunk.whole;
  }

  static __device__ Registers Fetch(const MatrixView& matrix) {
    Registers registers;
    for (int j = 0; j < kChunksPerThread; ++j) {
      const int i = static_cast<int>(threadIdx.x + j * kTileThreads);
      registers.chunks[j] =
          LoadChunk(matrix, i / kChunksPerRow, i % kChunksPerRow * kChunk);
    }
    return registers;
  }

  __device__ void Put(const Registers& registers) {
    for (int j = 0; j < kChunksPerThread; ++j) {
      const int i = static_cast<int>(threadIdx.x + j * kTileThreads);
      Bf16* to =
          data + i / kChunksPerRow * kStride + i % kChunksPerRow * kChunk;
      *reinterpret_cast<uint4*>(to) = registers.chunks[j];
    }
  }

  // The 16 x 16 fragment at (outer, depth).
  __device__ const Bf16* At(int outer, int depth) const {
    return kDepthIsRows ? data + depth * kStride + outer
                        : data + outer * kStride + depth;
  }
};

template <bool kLeftDepthIsRows, bool kRightDepthIsRows>
struct TileMemory {
  OperandTile<kLeftDepthIsRows> left;
  OperandTile<kRightDepthIsRows> right;
  alignas(128) float sums[kTileSide][kTileSide + 8];
};

// sums[i][j] = sum over d in [begin, end) of left(i, d) right(j, d), f32. The
// views start at the tile's outer index and at depth 0; `begin` is a multiple
// of kTileDepth, `end` one too or the operands' depth. All threads call it; the
// sums are there for all when it returns.
template <bool kLeftDepthIsRows, bool kRightDepthIsRows>
__device__ void MultiplyTile(
    const MatrixView& left, const MatrixView& right, int64_t begin, int64_t end,
    TileMemory<kLeftDepthIsRows, kRightDepthIsRows>* memory) {
  namespace wmma = nvcuda::wmma;
  using Left = OperandTile<kLeftDepthIsRows>;
  using Right = OperandTile<kRightDepthIsRows>;
  constexpr int kFragment = 16;
  using LeftFragment = wmma::fragment<
      wmma::matrix_a, kFragment, kFragment, kFragment, Bf16,
      std::conditional_t<kLeftDepthIsRows, wmma::col_major, wmma::row_major>>;
  using RightFragment = wmma::fragment<
      wmma::matrix_b, kFragment, kFragment, kFragment, Bf16,
      std::conditional_t<kRightDepthIsRows, wmma::row_major, wmma::col_major>>;
  const auto left_at = [&](int64_t d) {
    return Left::Fetch(kLeftDepthIsRows ? left.Shifted(d, 0)
                                        : left.Shifted(0, d));
  };
  const auto right_at = [&](int64_t d) {
    return Right::Fetch(kRightDepthIsRows ? right.Shifted(d, 0)
                                          : right.Shifted(0, d));
  };
  // Each of the four warps has a quarter of the tile: 2 x 2 fragments.
  const int first_row = WarpIndex() / 2 * 2 * kFragment;
  const int first_column = WarpIndex() % 2 * 2 * kFragment;
  wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float>
      sums[2][2];
  for (auto& row : sums) {
    for (auto& sum : row) wmma::fill_fragment(sum, 0.0F);
  }
  typename Left::Registers next_left = {};
  typename Right::Registers next_right = {};
  if (begin < end) {
    next_left = left_at(begin);
    next_right = right_at(begin);
  }
  for (int64_t d = begin; d < end; d += kTileDepth) {
    memory->left.Put(next_left);
    memory->right.Put(next_right);
    __syncthreads();
    if (d + kTileDepth < end) {
      next_left = left_at(d + kTileDepth);
      next_right = right_at(d + kTileDepth);
    }
    for (int k = 0; k < kTileDepth; k += kFragment) {
      LeftFragment rows[2];
      RightFragment columns[2];
      for (int i = 0; i < 2; ++i) {
        const int shift = i * kFragment;
        wmma::load_matrix_sync(rows[i], memory->left.At(first_row + shift, k),
                               Left::kStride);
        wmma::load_matrix_sync(columns[i],
                               memory->right.At(first_column + shift, k),
                               Right::kStride);
      }
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
          wmma::mma_sync(sums[i][j], rows[i], columns[j], sums[i][j]);
        }
      }
    }
    // Before the next operands overwrite what other warps still read.
    __syncthreads();
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      wmma::store_matrix_sync(&memory->sums[first_row + i * kFragment]
                                           [first_column + j * kFragment],
                              sums[i][j], kTileSide + 8, wmma::mem_row_major);
    }
  }
  __syncthreads();
}

// What a launch's blocks find out about their part of it.

__device__ inline LoraMatrix MatrixOf(const LoraTable& table, int layout,
                                      int64_t slot) {
  return table.matrices[layout * table.num_slots + slot];
}

__host__ __device__ inline int64_t RankTiles(const LoraProduct& product) {
  return (product.max_rank + kTileSide - 1) / kTileSide;
}

// Tiles of the features of all projections, those of one after the other's.
__host__ __device__ inline int64_t TilesOf(const LoraProjection& projection) {
  return (projection.features + kTileSide - 1) / kTileSide;
}
inline int64_t FeatureTiles(const LoraProduct& product) {
  int64_t tiles = 0;
  for (int i = 0; i < product.num_projections; ++i) {
    tiles += TilesOf(product.projections[i]);
  }
  return tiles;
}

struct FeatureTile {
  int projection;
  int64_t first;  // Feature of it.
};
__device__ inline FeatureTile FeatureTileAt(const LoraProduct& product,
                                            int64_t tile) {
  int projection = 0;
  while (tile >= TilesOf(product.projections[projection])) {
    tile -= TilesOf(product.projections[projection]);
    ++projection;
  }
  return {projection, tile * kTileSide};
}

// Calls run(row, column) for this thread's elements of a tile.
template <typename Run>
__device__ void ForTileElements(Run run) {
  for (int i = static_cast<int>(threadIdx.x); i < kTileFloats;
       i += static_cast<int>(kTileThreads)) {
    run(i / kTileSide, i % kTileSide);
  }
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_TILE_CUH_
