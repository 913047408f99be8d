// Functions that lora_product.cu and lora_gradient.cu share: they look up a
// matrix, count tiles, and choose and launch the kernel for a rank.
#ifndef WEFT_KERNELS_CUDA_LORA_LORA_TILE_CUH_
#define WEFT_KERNELS_CUDA_LORA_LORA_TILE_CUH_

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora/lora_product.h"
#include "kernels/cuda/tile.cuh"

namespace weft::kernels::cuda {

__device__ inline LoraMatrix MatrixOf(const LoraTable& table, int layout,
                                      int64_t slot) {
  return table.matrices[layout * table.num_slots + slot];
}

inline int64_t RankTiles(const LoraProduct& product) {
  return CeilDiv(product.max_rank, LoraRankTile(product.max_rank));
}

// Return the number of tiles of `width` features in one projection, and in all
// projections of a product.
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
  int first;  // First feature in the projection.
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
  static constexpr int kRank = kTheRank;  // One of the values of LoraRankTile.
  // Blocks per multiprocessor. This number limits the registers of a thread.
  static constexpr int kBlocks = kRank <= 16 ? 3 : kRank <= 64 ? 2 : 1;
  // Steps in shared memory, of at most the 99 KiB that every device has.
  static constexpr int kStages = kRank <= 64 ? 4 : 3;
};
// Calls run(TileKind) with the kind for kOrder and the product's largest rank.
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

// Launches a kernel whose blocks have the threads of Tile and the dynamic
// shared memory of Memory.
template <typename Tile, typename Memory, typename... Parameters,
          typename... Arguments>
cudaError_t LaunchTile(void (*kernel)(Parameters...), int64_t grid_x,
                       int64_t grid_y, cudaStream_t stream,
                       Arguments... arguments) {
  return LaunchShaped(kernel,
                      {.grid_x = grid_x,
                       .grid_y = grid_y,
                       .threads = Tile::kThreads,
                       .shared_bytes = sizeof(Memory)},
                      stream, arguments...);
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_LORA_TILE_CUH_
