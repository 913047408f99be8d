#include "kernels/cuda/lora_product.h"
#include "kernels/cuda/lora_tile.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int64_t kMaxSplits = 64;
static_assert(kTileSide == kLoraTileSide);

// y of one element of an item.
__device__ void WriteElement(const LoraProduct& product,
                             const LoraProductItem& item, int row,
                             int64_t output, float sum) {
  Bf16* y = static_cast<Bf16*>(product.y_TO) +
            (item.row + row) * product.y_stride + item.y_column + output;
  const float scaled = item.scale * sum;
  Store(product.adds ? ToFloat(*y) + scaled : scaled, y);
}

// Block (item, tile of outputs and split, split fastest).
template <bool kInputsByOutputs>
__global__ void __launch_bounds__(kTileThreads)
    LoraProductKernel(LoraProduct product) {
  __shared__ TileMemory<false, kInputsByOutputs> memory;
  const LoraProductItem item = product.items[blockIdx.x];
  const int split = static_cast<int>(blockIdx.y) % product.num_splits;
  const int64_t tile = static_cast<int>(blockIdx.y) / product.num_splits;
  const int64_t first = tile * kTileSide;
  if (first >= item.num_outputs || item.num_rows == 0) return;
  const MatrixView x = {static_cast<const Bf16*>(product.x_TI) +
                            item.row * product.x_stride + item.x_column,
                        product.x_stride, item.num_rows, item.num_inputs};
  const auto* weight = static_cast<const Bf16*>(item.weight);
  const MatrixView w = kInputsByOutputs
                           ? MatrixView{weight, item.num_outputs,
                                        item.num_inputs, item.num_outputs}
                                 .Shifted(0, first)
                           : MatrixView{weight, item.num_inputs,
                                        item.num_outputs, item.num_inputs}
                                 .Shifted(first, 0);
  const DepthRange depth =
      SplitDepth(item.num_inputs, split, product.num_splits);
  MultiplyTile(x, w, depth.begin, depth.end, &memory);
  if (product.num_splits == 1) {
    ForTileElements([&](int row, int column, int /*index*/) {
      if (row < item.num_rows && first + column < item.num_outputs) {
        WriteElement(product, item, row, first + column,
                     memory.sums[row][column]);
      }
    });
    return;
  }
  const int64_t tiles = gridDim.y / product.num_splits;
  float* partial = PartialTile(product.workspace, gridDim.x * tiles,
                               blockIdx.x * tiles + tile, split);
  ForTileElements([&](int row, int column, int index) {
    partial[index] = memory.sums[row][column];
  });
}

// Block (item, tile of outputs): adds up the parts in their order.
__global__ void __launch_bounds__(kTileThreads)
    AddSplitsKernel(LoraProduct product) {
  const LoraProductItem item = product.items[blockIdx.x];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTileSide;
  const int64_t tiles = gridDim.y;
  ForTileElements([&](int row, int column, int index) {
    if (row >= item.num_rows || first + column >= item.num_outputs) return;
    float sum = 0;
    for (int split = 0; split < product.num_splits; ++split) {
      sum += PartialTile(product.workspace, gridDim.x * tiles,
                         blockIdx.x * tiles + blockIdx.y, split)[index];
    }
    WriteElement(product, item, row, first + column, sum);
  });
}

}  // namespace

int64_t LoraProductWorkspace(const LoraProduct& product) {
  if (product.num_splits == 1) return 0;
  return product.num_splits * product.num_items *
         CeilDiv(product.max_outputs, kTileSide) * kTileFloats;
}

cudaError_t RunLoraProduct(const LoraProduct& product, cudaStream_t stream) {
  if (product.num_splits < 1 || product.num_splits > kMaxSplits) {
    return cudaErrorInvalidValue;
  }
  if (product.num_items == 0 || product.max_outputs == 0) return cudaSuccess;
  const int64_t tiles = CeilDiv(product.max_outputs, kTileSide);
  const auto kernel = product.order == LoraWeightOrder::kInputsByOutputs
                          ? LoraProductKernel<true>
                          : LoraProductKernel<false>;
  const cudaError_t status =
      Launch(kernel, product.num_items, tiles * product.num_splits,
             kTileThreads, stream, product);
  if (status != cudaSuccess || product.num_splits == 1) return status;
  return Launch(AddSplitsKernel, product.num_items, tiles, kTileThreads, stream,
                product);
}

}  // namespace weft::kernels::cuda
