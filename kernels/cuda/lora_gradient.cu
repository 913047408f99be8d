#include "kernels/cuda/lora_gradient.h"
#include "kernels/cuda/lora_tile.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int64_t kMaxSplits = 64;

// The tiles of an item's gradient, those of Q fastest.
struct TileGrid {
  int64_t of_p;
  int64_t of_q;
};

__host__ __device__ inline TileGrid TilesOf(const LoraGradient& gradient) {
  return {(gradient.max_p + kTileSide - 1) / kTileSide,
          (gradient.max_q + kTileSide - 1) / kTileSide};
}

__device__ void AddElement(const LoraGradientItem& item, int64_t i, int64_t j,
                           float sum) {
  item.gradient_PQ[i * item.num_q + j] += item.scale * sum;
}

// Block (item, tile and split, split fastest).
__global__ void __launch_bounds__(kTileThreads)
    LoraGradientKernel(LoraGradient gradient) {
  __shared__ TileMemory<true, true> memory;
  const LoraGradientItem item = gradient.items[blockIdx.x];
  const TileGrid tiles = TilesOf(gradient);
  const int split = static_cast<int>(blockIdx.y) % gradient.num_splits;
  const int64_t tile = static_cast<int>(blockIdx.y) / gradient.num_splits;
  const int64_t first_p = tile / tiles.of_q * kTileSide;
  const int64_t first_q = tile % tiles.of_q * kTileSide;
  if (first_p >= item.num_p || first_q >= item.num_q || item.num_rows == 0) {
    return;
  }
  const MatrixView p = {static_cast<const Bf16*>(gradient.p_TP) +
                            item.row * gradient.p_stride + item.p_column,
                        gradient.p_stride, item.num_rows, item.num_p};
  const MatrixView q = {static_cast<const Bf16*>(gradient.q_TQ) +
                            item.row * gradient.q_stride + item.q_column,
                        gradient.q_stride, item.num_rows, item.num_q};
  const DepthRange rows = SplitDepth(item.num_rows, split, gradient.num_splits);
  MultiplyTile(p.Shifted(0, first_p), q.Shifted(0, first_q), rows.begin,
               rows.end, &memory);
  if (gradient.num_splits == 1) {
    ForTileElements([&](int i, int j, int /*index*/) {
      if (first_p + i < item.num_p && first_q + j < item.num_q) {
        AddElement(item, first_p + i, first_q + j, memory.sums[i][j]);
      }
    });
    return;
  }
  const int64_t num_tiles = tiles.of_p * tiles.of_q;
  float* partial = PartialTile(gradient.workspace, gridDim.x * num_tiles,
                               blockIdx.x * num_tiles + tile, split);
  ForTileElements(
      [&](int i, int j, int index) { partial[index] = memory.sums[i][j]; });
}

// Block (item, tile): adds up the parts in their order.
__global__ void __launch_bounds__(kTileThreads)
    AddSplitsKernel(LoraGradient gradient) {
  const LoraGradientItem item = gradient.items[blockIdx.x];
  const TileGrid tiles = TilesOf(gradient);
  const int64_t tile = blockIdx.y;
  const int64_t first_p = tile / tiles.of_q * kTileSide;
  const int64_t first_q = tile % tiles.of_q * kTileSide;
  if (item.num_rows == 0) return;
  const int64_t num_tiles = tiles.of_p * tiles.of_q;
  ForTileElements([&](int i, int j, int index) {
    if (first_p + i >= item.num_p || first_q + j >= item.num_q) return;
    float sum = 0;
    for (int split = 0; split < gradient.num_splits; ++split) {
      sum += PartialTile(gradient.workspace, gridDim.x * num_tiles,
                         blockIdx.x * num_tiles + tile, split)[index];
    }
    AddElement(item, first_p + i, first_q + j, sum);
  });
}

}  // namespace

int64_t LoraGradientWorkspace(const LoraGradient& gradient) {
  if (gradient.num_splits == 1) return 0;
  const TileGrid tiles = TilesOf(gradient);
  return gradient.num_splits * gradient.num_items * tiles.of_p * tiles.of_q *
         kTileFloats;
}

cudaError_t AddLoraGradient(const LoraGradient& gradient, cudaStream_t stream) {
  if (gradient.num_splits < 1 || gradient.num_splits > kMaxSplits) {
    return cudaErrorInvalidValue;
  }
  const TileGrid tiles = TilesOf(gradient);
  const int64_t num_tiles = tiles.of_p * tiles.of_q;
  if (gradient.num_items == 0 || num_tiles == 0) return cudaSuccess;
  const cudaError_t status =
      Launch(LoraGradientKernel, gradient.num_items,
             num_tiles * gradient.num_splits, kTileThreads, stream, gradient);
  if (status != cudaSuccess || gradient.num_splits == 1) return status;
  return Launch(AddSplitsKernel, gradient.num_items, num_tiles, kTileThreads,
                stream, gradient);
}

}  // namespace weft::kernels::cuda
