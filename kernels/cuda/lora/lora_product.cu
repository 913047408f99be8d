#include "kernels/cuda/lora/lora_product.h"
#include "kernels/cuda/lora/lora_tile.cuh"
#include "kernels/cuda/tile_parts.cuh"

namespace weft::kernels::cuda {
namespace {

// The depth that a tile multiplies in one step. PartDepth returns a multiple of
// kStepDepth.
constexpr int kStepDepth = 64;

constexpr int kBlockRows = kLoraBlockRows;
// The number of features that a block of the expansion computes.
constexpr int kExpandFeatures = 64;

template <typename Kind>
using ShrinkTile = Tile<kBlockRows, Kind::kRank, kStepDepth, Kind::kStages,
                        /*kLeftDepthIsRows=*/false,
                        Kind::kOrder == LoraOrder::kFeaturesByRank>;
// The depth is the rank: one step, or several steps for ranks above kStepDepth.
template <typename Kind>
using ExpandTile =
    Tile<kBlockRows, kExpandFeatures,
         Kind::kRank <= kStepDepth ? Kind::kRank : kStepDepth,
         Kind::kRank <= kStepDepth ? 1 : 2, /*kLeftDepthIsRows=*/false,
         Kind::kOrder == LoraOrder::kRankByFeatures>;
template <typename Kind>
struct ExpandMemory {
  typename ExpandTile<Kind>::Memory product;
  // The old values of X, to which the block adds.
  OperandTile<kBlockRows, kExpandFeatures, /*kDepthIsRows=*/false,
              ExpandTile<Kind>::kThreads>
      before;
};

__device__ MatrixView FeaturesOf(const LoraProduct& product,
                                 const LoraProjection& projection,
                                 const LoraRowBlock& block) {
  return {static_cast<const Bf16*>(product.features_TF) +
              block.row * product.features_stride + projection.column,
          product.features_stride, block.num_rows,
          static_cast<int>(projection.features)};
}

__device__ MatrixView ShrunkOf(const LoraProduct& product,
                               const LoraMatrix& matrix,
                               const LoraRowBlock& block) {
  return {static_cast<const Bf16*>(product.shrunk_TR) +
              block.row * product.shrunk_stride + matrix.column,
          product.shrunk_stride, block.num_rows, matrix.rank};
}

// Returns the adapter's matrix from rank `rank` and feature `feature` on.
template <LoraOrder kOrder>
__device__ MatrixView WeightOf(const LoraProjection& projection,
                               const LoraMatrix& matrix,
                               const LoraRowBlock& block, int rank,
                               int feature) {
  const auto features = static_cast<int>(projection.features);
  const auto* weight = static_cast<const Bf16*>(block.weights) + matrix.offset;
  if constexpr (kOrder == LoraOrder::kRankByFeatures) {
    return MatrixView{weight, features, matrix.rank, features}.Shifted(rank,
                                                                       feature);
  } else {
    return MatrixView{weight, matrix.rank, features, matrix.rank}.Shifted(
        feature, rank);
  }
}

// Returns the number of features in one part of a sum: a multiple of
// kStepDepth.
__host__ __device__ inline int64_t PartDepth(int64_t features, int64_t cuts,
                                             int64_t max_parts) {
  const int64_t by_parts = (features + max_parts - 1) / max_parts;
  const int64_t by_cuts = kLoraSpan / cuts;
  const int64_t depth = by_parts > by_cuts ? by_parts : by_cuts;
  return (depth + kStepDepth - 1) / kStepDepth * kStepDepth;
}

__host__ __device__ inline int64_t NumParts(int64_t features, int64_t cuts,
                                            int64_t max_parts) {
  const int64_t depth = PartDepth(features, cuts, max_parts);
  return (features + depth - 1) / depth;
}

// A block computes one part of the sums for one LoraRowBlock, one projection
// and one tile of ranks. Among the blocks that share a sum, the last to finish
// adds up the parts. Along blockIdx.y, the part varies fastest.
template <typename Kind>
__global__ void __launch_bounds__(ShrinkTile<Kind>::kThreads, Kind::kBlocks)
    ShrinkKernel(LoraProduct product, int rank_tiles, int max_parts) {
  using Tile = ShrinkTile<Kind>;
  const LoraRowBlock block = product.table.blocks[blockIdx.x];
  const int part = static_cast<int>(blockIdx.y) % max_parts;
  const int tile = static_cast<int>(blockIdx.y) / max_parts;
  const LoraProjection projection = product.projections[tile / rank_tiles];
  const int first = tile % rank_tiles * Kind::kRank;
  const LoraMatrix matrix =
      MatrixOf(product.table, block.layout, projection.slot);
  const auto num_parts = static_cast<int>(
      NumParts(projection.features, block.cuts, block.max_parts));
  if (first >= matrix.rank || part >= num_parts) return;
  const auto features = static_cast<int>(projection.features);
  const auto depth =
      static_cast<int>(PartDepth(features, block.cuts, block.max_parts));
  const int end = (part + 1) * depth;
  typename Tile::Sums sums;
  Tile::Multiply(FeaturesOf(product, projection, block),
                 WeightOf<Kind::kOrder>(projection, matrix, block, first, 0),
                 part * depth, end < features ? end : features,
                 static_cast<typename Tile::Memory*>(DynamicShared()), &sums);
  if (num_parts > 1) {
    const int64_t place =
        int64_t{blockIdx.x} * product.num_projections * rank_tiles + tile;
    if (!AddParts<Tile>(product.workspace + place * max_parts * Tile::kFloats,
                        part, num_parts, product.counters + place, &sums)) {
      return;
    }
  }
  auto* shrunk = static_cast<Bf16*>(product.shrunk_TR) +
                 block.row * product.shrunk_stride + matrix.column + first;
  Tile::ForPairs(sums, [&](int row, int rank, float sum, float next) {
    if (row >= block.num_rows) return;
    Bf16* to = shrunk + row * product.shrunk_stride + rank;
    if (first + rank < matrix.rank) Store(matrix.scale * sum, to);
    if (first + rank + 1 < matrix.rank) Store(matrix.scale * next, to + 1);
  });
}

// Four adjacent lanes share a row. Before the call, each of them holds two
// columns of each of four fragments. Afterwards lane i of the four holds all
// eight columns of fragment i.
__device__ void TransposeInQuad(float (&pairs)[4][2]) {
#pragma unroll
  for (int mask = 1; mask <= 2; mask *= 2) {
    const bool is_upper = (Lane() & mask) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & mask) != 0) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& lower = pairs[i][e];
        float& upper = pairs[i | mask][e];
        const float other =
            __shfl_xor_sync(kAllLanes, is_upper ? lower : upper, mask);
        lower = is_upper ? other : lower;
        upper = is_upper ? upper : other;
      }
    }
  }
}

// Writes before + scale * sums to the first `size` elements of the chunk at
// `to`. If is_whole, writes the chunk with one access.
__device__ void AddToChunk(const uint4& before, const float (&sums)[4][2],
                           float scale, bool is_whole, int size, Bf16* to) {
  union {
    uint4 whole;
    Bf16 elements[kChunk];
  } chunk = {before};
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    Store(ToFloat(chunk.elements[e]) + scale * sums[e / 2][e % 2],
          &chunk.elements[e]);
  }
  if (is_whole) {
    *reinterpret_cast<uint4*>(to) = chunk.whole;
  } else {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (e < size) to[e] = chunk.elements[e];
    }
  }
}

// A block computes kExpandFeatures features of one projection for one
// LoraRowBlock.
template <typename Kind>
__global__ void __launch_bounds__(ExpandTile<Kind>::kThreads)
    ExpandKernel(LoraProduct product) {
  using Tile = ExpandTile<Kind>;
  const LoraRowBlock block = product.table.blocks[blockIdx.y];
  const FeatureTile tile = FeatureTileAt(product, kExpandFeatures, blockIdx.x);
  const LoraProjection projection = product.projections[tile.projection];
  const LoraMatrix matrix =
      MatrixOf(product.table, block.layout, projection.slot);
  if (matrix.rank == 0) return;
  const MatrixView y =
      FeaturesOf(product, projection, block).Shifted(0, tile.first);
  const bool is_aligned = y.IsAligned();
  // One condition for the whole tile makes all threads of a block take the same
  // branch.
  const bool is_whole = is_aligned && y.num_columns >= kExpandFeatures;
  auto* memory = static_cast<ExpandMemory<Kind>*>(DynamicShared());
  memory->before.Copy(y, is_aligned);
  typename Tile::Sums sums;
  Tile::Multiply(
      ShrunkOf(product, matrix, block),
      WeightOf<Kind::kOrder>(projection, matrix, block, 0, tile.first), 0,
      matrix.rank, &memory->product, &sums);
#pragma unroll
  for (int i = 0; i < 2 * Tile::kRowFragments; ++i) {
    const int row = Tile::FirstRow() + i * 8 + Lane() / 4;
#pragma unroll
    for (int first = 0; first < Tile::kColumnFragments; first += 4) {
      float pairs[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j][0] = sums.of[i / 2][first + j][i % 2 * 2];
        pairs[j][1] = sums.of[i / 2][first + j][i % 2 * 2 + 1];
      }
      TransposeInQuad(pairs);
      const int column = Tile::FirstColumn() + (first + Lane() % 4) * kChunk;
      if (row >= y.num_rows) continue;
      AddToChunk(memory->before.At(row, column / kChunk), pairs, matrix.scale,
                 is_whole, y.ChunkSize(column),
                 const_cast<Bf16*>(y.data) + row * y.stride + column);
    }
  }
}

// Returns a bound on the number of parts of a sum, for all projections and row
// blocks; 0 if there are no row blocks.
int64_t MaxParts(const LoraProduct& product) {
  const LoraTable& table = product.table;
  if (table.num_blocks == 0) return 0;
  int64_t max_parts = 0;
  for (int i = 0; i < product.num_projections; ++i) {
    const int64_t own = NumParts(product.projections[i].features,
                                 table.max_cuts, table.max_parts);
    max_parts = own > max_parts ? own : max_parts;
  }
  return max_parts;
}

// Returns the number of tiles of S for each LoraRowBlock.
int64_t ShrunkTiles(const LoraProduct& product) {
  return product.num_projections * RankTiles(product);
}

}  // namespace

int64_t LoraShrinkWorkspace(const LoraProduct& product) {
  const int64_t max_parts = MaxParts(product);
  if (max_parts <= 1) return 0;
  return product.table.num_blocks * ShrunkTiles(product) * max_parts *
         kLoraBlockRows * LoraRankTile(product.max_rank);
}

int64_t LoraCounters(const LoraProduct& product) {
  const int64_t of_shrink = product.table.num_blocks * ShrunkTiles(product);
  const int64_t of_gradient = product.table.num_sums *
                              FeatureTiles(product, kLoraTileFeatures) *
                              RankTiles(product);
  return of_shrink > of_gradient ? of_shrink : of_gradient;
}

cudaError_t RunLoraShrink(const LoraProduct& product, cudaStream_t stream) {
  const int64_t max_parts = MaxParts(product);
  if (product.max_rank == 0 || max_parts == 0) return cudaSuccess;
  return WithTileKind(product, [&](auto kind) {
    using Kind = decltype(kind);
    return LaunchTile<ShrinkTile<Kind>, typename ShrinkTile<Kind>::Memory>(
        ShrinkKernel<Kind>, product.table.num_blocks,
        ShrunkTiles(product) * max_parts, stream, product, RankTiles(product),
        max_parts);
  });
}

cudaError_t RunLoraExpand(const LoraProduct& product, cudaStream_t stream) {
  const int64_t tiles = FeatureTiles(product, kExpandFeatures);
  if (product.max_rank == 0 || product.table.num_blocks == 0 || tiles == 0) {
    return cudaSuccess;
  }
  return WithTileKind(product, [&](auto kind) {
    using Kind = decltype(kind);
    return LaunchTile<ExpandTile<Kind>, ExpandMemory<Kind>>(
        ExpandKernel<Kind>, tiles, product.table.num_blocks, stream, product);
  });
}

}  // namespace weft::kernels::cuda
