#include "kernels/cuda/lora/lora_gradient.h"
#include "kernels/cuda/lora/lora_tile.cuh"
#include "kernels/cuda/tile_parts.cuh"

namespace weft::kernels::cuda {
namespace {

// The number of rows in a step.
constexpr int kStepDepth = 64;

constexpr int kTileFeatures = kLoraTileFeatures;

// True if the rows of the gradient and of its tile are ranks (dA), false if
// they are features (dB).
template <typename Kind>
inline constexpr bool kRanksAreRows =
    Kind::kOrder == LoraOrder::kRankByFeatures;
template <typename Kind>
using GradientTile =
    Tile<kRanksAreRows<Kind> ? Kind::kRank : kTileFeatures,
         kRanksAreRows<Kind> ? kTileFeatures : Kind::kRank, kStepDepth,
         Kind::kStages,
         /*kLeftDepthIsRows=*/true, /*kRightDepthIsRows=*/true>;

// The part of a gradient that begins with the first element of the block's
// tile.
struct GradientView {
  float* data;
  int64_t stride;
  int num_rows;
  int num_columns;
};

// Prefetches the old gradient, to which the block will add.
template <typename Tile>
__device__ void PrefetchGradient(const GradientView& gradient) {
  typename Tile::Sums none = {};
  Tile::ForPairs(none, [&](int row, int column, float, float) {
    if (row >= gradient.num_rows || column >= gradient.num_columns) return;
    Prefetch(gradient.data + row * gradient.stride + column);
  });
}

template <typename Tile>
__device__ void AddToGradient(const GradientView& gradient, float scale,
                              const typename Tile::Sums& sums) {
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(gradient.data) % sizeof(float2) == 0 &&
      gradient.stride % 2 == 0;
  Tile::ForPairs(sums, [&](int row, int column, float sum, float next) {
    if (row >= gradient.num_rows || column >= gradient.num_columns) return;
    float* to = gradient.data + row * gradient.stride + column;
    const bool has_next = column + 1 < gradient.num_columns;
    if (is_aligned && has_next) {
      auto* pair = reinterpret_cast<float2*>(to);
      const float2 before = *pair;
      *pair = {before.x + scale * sum, before.y + scale * next};
    } else {
      to[0] += scale * sum;
      if (has_next) to[1] += scale * next;
    }
  });
}

// A block computes one tile of a gradient over one LoraRowPart. The tile has
// some ranks and some features of one projection. Along blockIdx.x, the ranks
// vary fastest.
template <typename Kind>
__global__ void __launch_bounds__(GradientTile<Kind>::kThreads, Kind::kBlocks)
    LoraGradientKernel(LoraProduct product, int rank_tiles) {
  using Tile = GradientTile<Kind>;
  const LoraRowPart part = product.table.parts[blockIdx.y];
  const FeatureTile tile =
      FeatureTileAt(product, kTileFeatures, blockIdx.x / rank_tiles);
  const int first_rank =
      static_cast<int>(blockIdx.x % rank_tiles) * Kind::kRank;
  const LoraProjection projection = product.projections[tile.projection];
  const LoraMatrix matrix =
      MatrixOf(product.table, part.layout, projection.slot);
  if (first_rank >= matrix.rank) return;
  const MatrixView features = {
      static_cast<const Bf16*>(product.features_TF) +
          part.row * product.features_stride + projection.column + tile.first,
      product.features_stride, part.num_rows,
      static_cast<int>(projection.features) - tile.first};
  const MatrixView shrunk = {
      static_cast<const Bf16*>(product.shrunk_TR) +
          part.row * product.shrunk_stride + matrix.column + first_rank,
      product.shrunk_stride, part.num_rows, matrix.rank - first_rank};
  constexpr bool kByRank = kRanksAreRows<Kind>;
  float* of_matrix = part.gradient + matrix.offset;
  const GradientView gradient =
      kByRank
          ? GradientView{of_matrix + first_rank * projection.features +
                             tile.first,
                         projection.features, shrunk.num_columns,
                         features.num_columns}
          : GradientView{of_matrix + tile.first * matrix.rank + first_rank,
                         matrix.rank, features.num_columns, shrunk.num_columns};
  if (part.sum < 0) PrefetchGradient<Tile>(gradient);
  typename Tile::Sums sums;
  Tile::Multiply(kByRank ? shrunk : features, kByRank ? features : shrunk, 0,
                 part.num_rows,
                 static_cast<typename Tile::Memory*>(DynamicShared()), &sums);
  if (part.sum >= 0) {
    const LoraPartialSum sum = product.table.sums[part.sum];
    const int64_t tiles = gridDim.x;
    float* workspace =
        product.workspace +
        (sum.first * tiles + int64_t{blockIdx.x} * sum.count) * Tile::kFloats;
    if (!AddParts<Tile>(workspace, part.partial, sum.count,
                        product.counters + part.sum * tiles + blockIdx.x,
                        &sums)) {
      return;
    }
  }
  AddToGradient<Tile>(gradient, matrix.scale, sums);
}

}  // namespace

int64_t LoraGradientWorkspace(const LoraProduct& product) {
  return product.table.num_partials * FeatureTiles(product, kTileFeatures) *
         kLoraTileFeatures * RankTiles(product) *
         LoraRankTile(product.max_rank);
}

cudaError_t AddLoraGradient(const LoraProduct& product, cudaStream_t stream) {
  const int64_t tiles =
      FeatureTiles(product, kTileFeatures) * RankTiles(product);
  if (product.table.num_parts == 0 || tiles == 0) return cudaSuccess;
  return WithTileKind(product, [&](auto kind) {
    using Kind = decltype(kind);
    return LaunchTile<GradientTile<Kind>, typename GradientTile<Kind>::Memory>(
        LoraGradientKernel<Kind>, tiles, product.table.num_parts, stream,
        product, RankTiles(product));
  });
}

}  // namespace weft::kernels::cuda
