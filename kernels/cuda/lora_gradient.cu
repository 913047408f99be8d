#include "kernels/cuda/lora_gradient.h"
#include "kernels/cuda/lora_tile.cuh"

namespace weft::kernels::cuda {
namespace {

// Elements that one block adds up.
constexpr int64_t kSumElements = int64_t{kTileThreads} * 32;

// Columns of all projections before this one.
__host__ __device__ inline int64_t FeaturesBefore(const LoraProduct& product,
                                                  int projection) {
  int64_t features = 0;
  for (int i = 0; i < projection; ++i) {
    features += product.projections[i].features;
  }
  return features;
}

// The gradient of one projection in a partial, as it lies in the adapter.
__device__ float* PartialOf(const LoraProduct& product, int projection,
                            int64_t partial) {
  const int64_t all = FeaturesBefore(product, product.num_projections);
  return product.workspace +
         (partial * all + FeaturesBefore(product, projection)) *
             product.max_rank;
}

// Block (rows; projection, tile of features and tile of ranks, ranks fastest).
template <LoraOrder kOrder>
__global__ void __launch_bounds__(kTileThreads)
    LoraGradientKernel(LoraProduct product) {
  __shared__ TileMemory<true, true> memory;
  const LoraRowPart part = product.table.parts[blockIdx.x];
  const auto rank_tiles = static_cast<int>(RankTiles(product));
  const FeatureTile tile =
      FeatureTileAt(product, static_cast<int>(blockIdx.y) / rank_tiles);
  const int64_t first_rank =
      static_cast<int64_t>(static_cast<int>(blockIdx.y) % rank_tiles) *
      kTileSide;
  const LoraProjection projection = product.projections[tile.projection];
  const LoraMatrix matrix =
      MatrixOf(product.table, part.layout, projection.slot);
  if (first_rank >= matrix.rank) return;
  const MatrixView features = {
      static_cast<const Bf16*>(product.features_TF) +
          part.row * product.features_stride + projection.column + tile.first,
      product.features_stride, part.num_rows, projection.features - tile.first};
  const MatrixView shrunk = {
      static_cast<const Bf16*>(product.shrunk_TR) +
          part.row * product.shrunk_stride + matrix.column + first_rank,
      product.shrunk_stride, part.num_rows, matrix.rank - first_rank};
  constexpr bool kRanksAreRows = kOrder == LoraOrder::kRankByFeatures;
  MultiplyTile(kRanksAreRows ? shrunk : features,
               kRanksAreRows ? features : shrunk, 0, part.num_rows, &memory);
  float* to = part.partial < 0
                  ? part.gradient + matrix.offset
                  : PartialOf(product, tile.projection, part.partial);
  ForTileElements([&](int i, int j) {
    const int64_t rank = first_rank + (kRanksAreRows ? i : j);
    const int64_t feature = tile.first + (kRanksAreRows ? j : i);
    if (rank >= matrix.rank || feature >= projection.features) return;
    const int64_t at = kRanksAreRows ? rank * projection.features + feature
                                     : feature * matrix.rank + rank;
    const float sum = memory.sums[i][j];
    to[at] = part.partial < 0 ? to[at] + matrix.scale * sum : sum;
  });
}

// Block (gradient; projection and elements): adds up the partials in their
// order.
__global__ void __launch_bounds__(kTileThreads)
    AddPartialsKernel(LoraProduct product, int blocks_per_projection) {
  const LoraPartialSum sum = product.table.sums[blockIdx.x];
  const int which = static_cast<int>(blockIdx.y) / blocks_per_projection;
  const LoraProjection projection = product.projections[which];
  const LoraMatrix matrix =
      MatrixOf(product.table, sum.layout, projection.slot);
  const int64_t num_elements = projection.features * matrix.rank;
  const int64_t first = static_cast<int64_t>(static_cast<int>(blockIdx.y) %
                                             blocks_per_projection) *
                        kSumElements;
  for (int64_t i = first + threadIdx.x;
       i < first + kSumElements && i < num_elements; i += kTileThreads) {
    float total = 0;
    for (int p = 0; p < sum.count; ++p) {
      total += PartialOf(product, which, sum.first + p)[i];
    }
    sum.gradient[matrix.offset + i] += matrix.scale * total;
  }
}

int64_t MaxFeatures(const LoraProduct& product) {
  int64_t features = 0;
  for (int i = 0; i < product.num_projections; ++i) {
    const int64_t own = product.projections[i].features;
    features = own > features ? own : features;
  }
  return features;
}

}  // namespace

int64_t LoraGradientWorkspace(const LoraProduct& product) {
  return product.table.num_partials *
         FeaturesBefore(product, product.num_projections) * product.max_rank;
}

cudaError_t AddLoraGradient(const LoraProduct& product, cudaStream_t stream) {
  const int64_t tiles = FeatureTiles(product) * RankTiles(product);
  if (product.table.num_parts == 0 || tiles == 0) return cudaSuccess;
  const auto kernel = product.order == LoraOrder::kRankByFeatures
                          ? LoraGradientKernel<LoraOrder::kRankByFeatures>
                          : LoraGradientKernel<LoraOrder::kFeaturesByRank>;
  const cudaError_t status = Launch(kernel, product.table.num_parts, tiles,
                                    kTileThreads, stream, product);
  if (status != cudaSuccess || product.table.num_sums == 0) return status;
  const int64_t blocks =
      CeilDiv(MaxFeatures(product) * product.max_rank, kSumElements);
  return Launch(AddPartialsKernel, product.table.num_sums,
                product.num_projections * blocks, kTileThreads, stream, product,
                blocks);
}

}  // namespace weft::kernels::cuda
