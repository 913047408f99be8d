#include "kernels/cuda/lora_product.h"
#include "kernels/cuda/lora_tile.cuh"

namespace weft::kernels::cuda {
namespace {

static_assert(kTileSide == kLoraTileSide);

__device__ MatrixView FeaturesOf(const LoraProduct& product,
                                 const LoraProjection& projection,
                                 const LoraRowBlock& block) {
  return {static_cast<const Bf16*>(product.features_TF) +
              block.row * product.features_stride + projection.column,
          product.features_stride, block.num_rows, projection.features};
}

__device__ MatrixView ShrunkOf(const LoraProduct& product,
                               const LoraMatrix& matrix,
                               const LoraRowBlock& block) {
  return {static_cast<const Bf16*>(product.shrunk_TR) +
              block.row * product.shrunk_stride + matrix.column,
          product.shrunk_stride, block.num_rows, matrix.rank};
}

// The adapter's matrix, from rank `rank` and feature `feature` on.
template <LoraOrder kOrder>
__device__ MatrixView WeightOf(const LoraProjection& projection,
                               const LoraMatrix& matrix,
                               const LoraRowBlock& block, int64_t rank,
                               int64_t feature) {
  const auto* weight = static_cast<const Bf16*>(block.weights) + matrix.offset;
  if constexpr (kOrder == LoraOrder::kRankByFeatures) {
    return MatrixView{weight, projection.features, matrix.rank,
                      projection.features}
        .Shifted(rank, feature);
  } else {
    return MatrixView{weight, matrix.rank, projection.features, matrix.rank}
        .Shifted(feature, rank);
  }
}

// Features of one part of a sum over them, whole steps of the tile.
__host__ __device__ inline int64_t PartDepth(int64_t features, int64_t cuts) {
  const int64_t steps = (features + kLoraMaxParts * kTileDepth - 1) /
                        (kLoraMaxParts * kTileDepth);
  const int64_t least = kLoraSpan / cuts;
  return steps * kTileDepth > least ? steps * kTileDepth : least;
}

__host__ __device__ inline int64_t NumParts(int64_t features, int64_t cuts) {
  const int64_t depth = PartDepth(features, cuts);
  return (features + depth - 1) / depth;
}

// Sums [rows, R] of a part: each block of rows has room for max_parts, those of
// one projection after those of the one before.
__device__ float* PartOf(const LoraProduct& product, int projection,
                         int max_parts, int64_t part) {
  const int64_t block = projection * product.table.num_blocks + blockIdx.x;
  return product.workspace +
         (block * max_parts + part) * kLoraBlockRows * product.max_rank;
}

__device__ void WriteShrunk(const LoraProduct& product,
                            const LoraMatrix& matrix, const LoraRowBlock& block,
                            int64_t row, int64_t rank, float sum) {
  Store(matrix.scale * sum, static_cast<Bf16*>(product.shrunk_TR) +
                                (block.row + row) * product.shrunk_stride +
                                matrix.column + rank);
}

// Block (rows; projection, tile of ranks and part, part fastest).
template <LoraOrder kOrder>
__global__ void __launch_bounds__(kTileThreads)
    ShrinkKernel(LoraProduct product, int max_parts) {
  __shared__ TileMemory<false, kOrder == LoraOrder::kFeaturesByRank> memory;
  const LoraRowBlock block = product.table.blocks[blockIdx.x];
  const int part = static_cast<int>(blockIdx.y) % max_parts;
  const int64_t tile = static_cast<int>(blockIdx.y) / max_parts;
  const int64_t tiles = RankTiles(product);
  const int which = static_cast<int>(tile / tiles);
  const int64_t first = tile % tiles * kTileSide;
  const LoraProjection projection = product.projections[which];
  const LoraMatrix matrix =
      MatrixOf(product.table, block.layout, projection.slot);
  const int64_t num_parts = NumParts(projection.features, block.cuts);
  if (first >= matrix.rank || part >= num_parts) return;
  const int64_t depth = PartDepth(projection.features, block.cuts);
  const int64_t end = (part + 1) * depth;
  MultiplyTile(FeaturesOf(product, projection, block),
               WeightOf<kOrder>(projection, matrix, block, first, 0),
               part * depth,
               end < projection.features ? end : projection.features, &memory);
  float* sums = PartOf(product, which, max_parts, part);
  ForTileElements([&](int row, int column) {
    const int64_t rank = first + column;
    if (row >= block.num_rows || rank >= matrix.rank) return;
    const float sum = memory.sums[row][column];
    if (num_parts == 1) {
      WriteShrunk(product, matrix, block, row, rank, sum);
    } else {
      sums[row * matrix.rank + rank] = sum;
    }
  });
}

// Block (rows, projection): adds up the parts in their order.
__global__ void __launch_bounds__(kTileThreads)
    AddPartsKernel(LoraProduct product, int max_parts) {
  const LoraRowBlock block = product.table.blocks[blockIdx.x];
  const int which = static_cast<int>(blockIdx.y);
  const LoraProjection projection = product.projections[which];
  const LoraMatrix matrix =
      MatrixOf(product.table, block.layout, projection.slot);
  const int64_t num_parts = NumParts(projection.features, block.cuts);
  if (num_parts == 1) return;
  for (int i = static_cast<int>(threadIdx.x); i < block.num_rows * matrix.rank;
       i += static_cast<int>(kTileThreads)) {
    float sum = 0;
    for (int64_t part = 0; part < num_parts; ++part) {
      sum += PartOf(product, which, max_parts, part)[i];
    }
    WriteShrunk(product, matrix, block, i / matrix.rank, i % matrix.rank, sum);
  }
}

// Block (rows; projection and tile of features).
template <LoraOrder kOrder>
__global__ void __launch_bounds__(kTileThreads)
    ExpandKernel(LoraProduct product) {
  __shared__ TileMemory<false, kOrder == LoraOrder::kRankByFeatures> memory;
  const LoraRowBlock block = product.table.blocks[blockIdx.x];
  const FeatureTile tile = FeatureTileAt(product, static_cast<int>(blockIdx.y));
  const LoraProjection projection = product.projections[tile.projection];
  const LoraMatrix matrix =
      MatrixOf(product.table, block.layout, projection.slot);
  if (matrix.rank == 0) return;
  MultiplyTile(ShrunkOf(product, matrix, block),
               WeightOf<kOrder>(projection, matrix, block, 0, tile.first), 0,
               matrix.rank, &memory);
  ForTileElements([&](int row, int column) {
    const int64_t feature = tile.first + column;
    if (row >= block.num_rows || feature >= projection.features) return;
    Bf16* y = static_cast<Bf16*>(product.features_TF) +
              (block.row + row) * product.features_stride + projection.column +
              feature;
    Store(ToFloat(*y) + matrix.scale * memory.sums[row][column], y);
  });
}

// The most parts that a projection has in a block; 0 without blocks.
int64_t MaxParts(const LoraProduct& product) {
  if (product.table.num_blocks == 0) return 0;
  int64_t max_parts = 0;
  for (int i = 0; i < product.num_projections; ++i) {
    const int64_t own =
        NumParts(product.projections[i].features, product.table.max_cuts);
    max_parts = own > max_parts ? own : max_parts;
  }
  return max_parts;
}

}  // namespace

int64_t LoraShrinkWorkspace(const LoraProduct& product) {
  const int64_t max_parts = MaxParts(product);
  if (max_parts <= 1) return 0;
  return product.num_projections * product.table.num_blocks * max_parts *
         kLoraBlockRows * product.max_rank;
}

cudaError_t RunLoraShrink(const LoraProduct& product, cudaStream_t stream) {
  const int64_t max_parts = MaxParts(product);
  if (product.max_rank == 0 || max_parts == 0) return cudaSuccess;
  const auto kernel = product.order == LoraOrder::kRankByFeatures
                          ? ShrinkKernel<LoraOrder::kRankByFeatures>
                          : ShrinkKernel<LoraOrder::kFeaturesByRank>;
  const cudaError_t status =
      Launch(kernel, product.table.num_blocks,
             product.num_projections * RankTiles(product) * max_parts,
             kTileThreads, stream, product, max_parts);
  if (status != cudaSuccess || max_parts == 1) return status;
  return Launch(AddPartsKernel, product.table.num_blocks,
                product.num_projections, kTileThreads, stream, product,
                max_parts);
}

cudaError_t RunLoraExpand(const LoraProduct& product, cudaStream_t stream) {
  const int64_t tiles = FeatureTiles(product);
  if (product.max_rank == 0 || product.table.num_blocks == 0 || tiles == 0) {
    return cudaSuccess;
  }
  const auto kernel = product.order == LoraOrder::kRankByFeatures
                          ? ExpandKernel<LoraOrder::kRankByFeatures>
                          : ExpandKernel<LoraOrder::kFeaturesByRank>;
  return Launch(kernel, product.table.num_blocks, tiles, kTileThreads, stream,
                product);
}

}  // namespace weft::kernels::cuda
