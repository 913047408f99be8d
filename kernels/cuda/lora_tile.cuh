// One output tile of the adapters' products on tensor cores. Copies of several
// steps along the depth are on their way while a step is multiplied; the sums
// stay in registers.
//
// Legend: an operand has an outer index (row or column of the tile) and the
// depth that is summed over. It lies in memory with either of them as rows.
#ifndef WEFT_KERNELS_CUDA_LORA_TILE_CUH_
#define WEFT_KERNELS_CUDA_LORA_TILE_CUH_

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/lora_product.h"
#include "kernels/cuda/mma.cuh"

namespace weft::kernels::cuda {

using Bf16 = __nv_bfloat16;

// Elements of 16 bytes, the widest access.
inline constexpr int kChunk = 8;
// Side of the part of an operand that one ldmatrix loads.
inline constexpr int kFragment = 16;

// A matrix in global memory, row-major; what is beyond its rows and columns
// reads as 0.
struct MatrixView {
  const Bf16* data;
  int64_t stride;
  int num_rows;
  int num_columns;

  __device__ MatrixView Shifted(int row, int column) const {
    return {data + row * stride + column, stride, num_rows - row,
            num_columns - column};
  }
  // Elements of the chunk at (row, column) that are there.
  __device__ int ChunkSize(int row, int column) const {
    const int count = row < num_rows ? num_columns - column : 0;
    return count < 0 ? 0 : count < kChunk ? count : kChunk;
  }
  // True when its rows' chunks can be accessed as a whole.
  __device__ bool IsAligned() const {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kChunk == 0;
  }
};

// One operand of a step in shared memory, for a block of kThreads threads.
template <int kOuter, int kDepth, bool kDepthIsRows, int kThreads>
struct OperandTile {
  static constexpr int kRows = kDepthIsRows ? kDepth : kOuter;
  static constexpr int kRowChunks = (kDepthIsRows ? kOuter : kDepth) / kChunk;
  static constexpr int kChunks = kRows * kRowChunks;
  static constexpr int kLineChunks = 8;  // Of all banks.

  uint4 chunks[kChunks];

  // Chunks of a row are permuted, so that those of one column in eight rows
  // lie in different banks.
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

  // Starts to copy the matrix' first rows and columns, or, of one that is not
  // aligned, does it.
  __device__ void Copy(const MatrixView& matrix, bool is_aligned) {
    if (is_aligned) {
#pragma unroll
      for (int j = 0; j < (kChunks + kThreads - 1) / kThreads; ++j) {
        const int i = static_cast<int>(threadIdx.x) + j * kThreads;
        if (kChunks % kThreads != 0 && i >= kChunks) break;
        const int row = i / kRowChunks, chunk = i % kRowChunks;
        const int count = matrix.ChunkSize(row, chunk * kChunk);
        const Bf16* from = matrix.data + row * matrix.stride + chunk * kChunk;
        CopyAsync(count > 0 ? from : matrix.data,
                  count * static_cast<int>(sizeof(Bf16)),
                  &chunks[Place(row, chunk)]);
      }
      return;
    }
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kChunks; i += kThreads) {
      const int row = i / kRowChunks, chunk = i % kRowChunks;
      const int count = matrix.ChunkSize(row, chunk * kChunk);
      const Bf16* from = matrix.data + row * matrix.stride + chunk * kChunk;
      auto* to = reinterpret_cast<Bf16*>(&chunks[Place(row, chunk)]);
#pragma unroll 1
      for (int e = 0; e < kChunk; ++e) to[e] = e < count ? from[e] : Bf16{};
    }
  }

  // The fragment at (outer, depth), as MultiplyAdd takes it on the left, or as
  // it takes two beside each other on the right.
  template <bool kIsLeft>
  __device__ void Load(int outer, int depth, unsigned (&fragments)[4]) const {
    const int matrix = Lane() / 8;
    const int outer_shift = (kIsLeft ? matrix % 2 : matrix / 2) * 8;
    const int depth_shift = (kIsLeft ? matrix / 2 : matrix % 2) * 8;
    const int chunk_shift = kDepthIsRows ? outer_shift : depth_shift;
    const int row =
        (kDepthIsRows ? depth + depth_shift : outer + outer_shift) + Lane() % 8;
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

// A tile of kRows x kColumns sums, kDepth at a time, kStages of them in shared
// memory. With one stage the depth is no more than kDepth.
template <int kRows, int kColumns, int kDepth, int kStages,
          bool kLeftDepthIsRows, bool kRightDepthIsRows>
struct Tile {
  // Warps have 16 x 16 sums or more, as square as may be.
  static constexpr int kShort = kRows < kColumns ? kRows : kColumns;
  static constexpr int kLong = kRows < kColumns ? kColumns : kRows;
  static constexpr int kMostWarps = kShort * kLong / (kFragment * kFragment);
  static constexpr int kWarps = kMostWarps < 8 ? kMostWarps : 8;
  static constexpr int kMostAlong = kLong / kFragment;
  static constexpr int kWarpsAlong = kShort > 2 * kFragment ? (kWarps + 1) / 2
                                     : kWarps < kMostAlong  ? kWarps
                                                            : kMostAlong;
  static constexpr int kWarpsDown =
      kRows < kColumns ? kWarps / kWarpsAlong : kWarpsAlong;
  static constexpr int kWarpsAcross = kWarps / kWarpsDown;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kWarpRows = kRows / kWarpsDown;
  static constexpr int kWarpColumns = kColumns / kWarpsAcross;
  static constexpr int kRowFragments = kWarpRows / kFragment;
  static constexpr int kColumnFragments = kWarpColumns / kChunk;
  static constexpr int64_t kFloats = int64_t{kRows} * kColumns;
  static_assert(kWarpRows % kFragment == 0 && kWarpColumns % kFragment == 0);

  using Left = OperandTile<kRows, kDepth, kLeftDepthIsRows, kThreads>;
  using Right = OperandTile<kColumns, kDepth, kRightDepthIsRows, kThreads>;
  struct Stage {
    Left left;
    Right right;
  };
  struct Memory {
    Stage stages[kStages];
  };
  // A thread's sums, as MultiplyAdd has them.
  struct Sums {
    float of[kRowFragments][kColumnFragments][4];
  };

  static __device__ int FirstRow() {
    return WarpIndex() / kWarpsAcross * kWarpRows;
  }
  static __device__ int FirstColumn() {
    return WarpIndex() % kWarpsAcross * kWarpColumns;
  }

  static __device__ void MultiplyStage(const Stage& stage, Sums* sums) {
#pragma unroll
    for (int d = 0; d < kDepth; d += kFragment) {
      unsigned rows[kRowFragments][4];
      unsigned columns[kColumnFragments / 2][4];
#pragma unroll
      for (int i = 0; i < kRowFragments; ++i) {
        stage.left.template Load<true>(FirstRow() + i * kFragment, d, rows[i]);
      }
#pragma unroll
      for (int j = 0; j < kColumnFragments / 2; ++j) {
        stage.right.template Load<false>(FirstColumn() + j * kFragment, d,
                                         columns[j]);
      }
#pragma unroll
      for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnFragments; ++j) {
          const unsigned column[2] = {columns[j / 2][j % 2 * 2],
                                      columns[j / 2][j % 2 * 2 + 1]};
          MultiplyAdd(rows[i], column, sums->of[i][j]);
        }
      }
    }
  }

  // sums(i, j) = sum over d in [begin, end) of left(i, d) right(j, d). The
  // views start at the tile's outer index and at depth 0; `begin` is a multiple
  // of kDepth, `end` one too or the operands' depth. All threads call it.
  static __device__ void Multiply(const MatrixView& left,
                                  const MatrixView& right, int begin, int end,
                                  Memory* memory, Sums* sums) {
    constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
    // A warp whose sums are all beyond the operands has nothing to do.
    const bool has_sums =
        FirstRow() < (kLeftDepthIsRows ? left.num_columns : left.num_rows) &&
        FirstColumn() <
            (kRightDepthIsRows ? right.num_columns : right.num_rows);
    const bool left_is_aligned = left.IsAligned();
    const bool right_is_aligned = right.IsAligned();
    const int num_steps = (end - begin + kDepth - 1) / kDepth;
    const auto copy = [&](int step) {
      if (step < num_steps) {
        const int d = begin + step * kDepth;
        Stage& stage = memory->stages[step % kStages];
        stage.left.Copy(
            kLeftDepthIsRows ? left.Shifted(d, 0) : left.Shifted(0, d),
            left_is_aligned);
        stage.right.Copy(
            kRightDepthIsRows ? right.Shifted(d, 0) : right.Shifted(0, d),
            right_is_aligned);
      }
      EndCopyGroup();
    };
    for (int step = 0; step < kAhead; ++step) copy(step);
    *sums = {};
    for (int step = 0; step < num_steps; ++step) {
      WaitForCopies<kAhead - 1>();
      // All have what all copied, and have read the stage that is next.
      __syncthreads();
      copy(step + kAhead);
      if (has_sums) MultiplyStage(memory->stages[step % kStages], sums);
    }
  }

  // Calls run(row, column, sum, next), where `next` is in the next column, for
  // this thread's sums.
  template <typename Run>
  static __device__ void ForPairs(const Sums& sums, Run run) {
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnFragments; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          run(FirstRow() + i * kFragment + half * 8 + Lane() / 4,
              FirstColumn() + j * kChunk + Lane() % 4 * 2,
              sums.of[i][j][2 * half], sums.of[i][j][2 * half + 1]);
        }
      }
    }
  }
};

// The tile's sums over all of its parts, added up in the parts' order by the
// block that comes last, which is told so. `workspace` has kFloats for each
// part; `counter` is 0 before and after. All threads call it.
template <typename Tile>
__device__ bool AddParts(float* workspace, int part, int num_parts,
                         unsigned* counter, typename Tile::Sums* sums) {
  constexpr int kQuads = Tile::kRowFragments * Tile::kColumnFragments;
  __shared__ bool is_last;
  auto* quads = reinterpret_cast<float4*>(workspace) + threadIdx.x;
  float(*own)[4] = &sums->of[0][0];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    quads[(part * kQuads + i) * Tile::kThreads] = {own[i][0], own[i][1],
                                                   own[i][2], own[i][3]};
  }
  __threadfence();
  __syncthreads();
  const auto last = static_cast<unsigned>(num_parts - 1);
  if (threadIdx.x == 0) is_last = atomicInc(counter, last) == last;
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  *sums = {};
  for (int p = 0; p < num_parts; ++p) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 x = __ldcg(&quads[(p * kQuads + i) * Tile::kThreads]);
      own[i][0] += x.x;
      own[i][1] += x.y;
      own[i][2] += x.z;
      own[i][3] += x.w;
    }
  }
  return true;
}

// What a launch and its blocks find out about their part of the work.

__device__ inline LoraMatrix MatrixOf(const LoraTable& table, int layout,
                                      int64_t slot) {
  return table.matrices[layout * table.num_slots + slot];
}

inline int64_t RankTiles(const LoraProduct& product) {
  return CeilDiv(product.max_rank, LoraRankTile(product.max_rank));
}

// Tiles, so many features wide, of all projections, those of one after the
// other's.
__host__ __device__ inline int64_t TilesOf(const LoraProjection& projection,
                                           int width) {
  return (projection.features + width - 1) / width;
}
inline int64_t FeatureTiles(const LoraProduct& product, int width) {
  int64_t tiles = 0;
  for (int i = 0; i < product.num_projections; ++i) {
    tiles += TilesOf(product.projections[i], width);
  }
  return tiles;
}

struct FeatureTile {
  int projection;
  int first;  // Feature of it.
};
__device__ inline FeatureTile FeatureTileAt(const LoraProduct& product,
                                            int width, int64_t tile) {
  int projection = 0;
  while (tile >= TilesOf(product.projections[projection], width)) {
    tile -= TilesOf(product.projections[projection], width);
    ++projection;
  }
  return {projection, static_cast<int>(tile) * width};
}

template <LoraOrder kTheOrder, int kTheRank>
struct TileKind {
  static constexpr LoraOrder kOrder = kTheOrder;
  static constexpr int kRank = kTheRank;  // A LoraRankTile.
};
// run(TileKind) of the kind that a launch needs.
template <LoraOrder kOrder, typename Run>
cudaError_t WithRankTile(const LoraProduct& product, Run run) {
  switch (LoraRankTile(product.max_rank)) {
    case 16:
      return run(TileKind<kOrder, 16>());
    case 32:
      return run(TileKind<kOrder, 32>());
    case 64:
      return run(TileKind<kOrder, 64>());
    default:
      return run(TileKind<kOrder, kLoraMaxRankTile>());
  }
}
template <typename Run>
cudaError_t WithTileKind(const LoraProduct& product, Run run) {
  return product.order == LoraOrder::kRankByFeatures
             ? WithRankTile<LoraOrder::kRankByFeatures>(product, run)
             : WithRankTile<LoraOrder::kFeaturesByRank>(product, run);
}

// Launch for a kernel whose blocks have the tile's threads and shared memory,
// more of it than a kernel may take without being asked.
template <typename Tile, typename Memory, typename... Parameters,
          typename... Arguments>
cudaError_t LaunchTile(void (*kernel)(Parameters...), int64_t grid_x,
                       int64_t grid_y, cudaStream_t stream,
                       Arguments... arguments) {
  constexpr auto kBytes = sizeof(Memory);
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(kBytes));
  if (status != cudaSuccess) return status;
  return LaunchWithShared(kernel, grid_x, grid_y, Tile::kThreads, kBytes,
                          stream, arguments...);
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_TILE_CUH_
