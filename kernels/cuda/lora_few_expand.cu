#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora_few_expand.cuh"

namespace weft::kernels::cuda {
namespace few_rows {
namespace {

constexpr int kExpandWarps = 4;
constexpr unsigned kExpandThreads = kExpandWarps * kWarp;
constexpr int kBlockFeatures = kExpandWarps * kWarpFeatures;
// The most steps of kDepth ranks of B that a warp loads at once. If all ranks
// fit in one step, ExpandKernel<1> runs instead, because more of its warps fit
// on a multiprocessor.
constexpr int kMostSteps = 2;

// Writes one element of S to shrunk_TR.
__device__ void KeepShrunk(const LoraFewRowsProduct& product,
                           const LoraFewRows& rows, int row, int column,
                           Bf16 value) {
  static_cast<Bf16*>(
      product.shrunk_TR)[(rows.row + row) * product.shrunk_stride + column] =
      value;
}

// Some features of one projection. One item adds to these features of y.
struct FeatureTile {
  int64_t slot;
  int64_t column;  // Where the projection begins in y.
  int features;    // Number of the projection's features.
  int first;       // First feature of the tile.
};

// Computes one item: up to 16 rows of y at kBlockFeatures features.
template <bool kAligned, int kSteps>
__device__ void ExpandItem(const Task& task, const LoraFewRows& rows,
                           const LoraMatrix& matrix, const FeatureTile& tile,
                           Slab* slab) {
  const LoraFewRowsProduct& product = task.product;
  const int g = Lane() / 4;
  const int first = tile.first + WarpIndex() * kWarpFeatures;
  const int own = first + Lane() % 4 * kChunk;
  Bf16* y = static_cast<Bf16*>(product.y_TO) +
            (rows.row + g) * product.y_stride + tile.column;
  const bool exists[2] = {g < rows.num_rows, g + kColumns < rows.num_rows};
  Chunk before[2];
  for (int i = 0; i < 2; ++i) {
    before[i] = Load<kAligned>(y + i * kColumns * product.y_stride, own,
                               tile.features, exists[i]);
  }
  WarpSums sums = {};
  const bool keeps = product.shrunk_TR != nullptr && tile.first == 0;
  const auto keep = [&](int row, int rank, Bf16 value) {
    if (keeps) KeepShrunk(product, rows, row, matrix.column + rank, value);
  };
  for (int rank = 0; rank < matrix.rank; rank += kSteps * kDepth) {
    // Loads B before FillSlab adds up S, so that both overlap.
    Chunk b[kSteps][kTiles];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      LoadStep<kAligned>(rows, matrix, tile.features, first, rank + i * kDepth,
                         b[i]);
    }
    FillSlab<kSteps * kDepth>(task.parts, rows, matrix, rank, keep, slab);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (rank + i * kDepth >= matrix.rank) break;
      MultiplyStep(*slab, i, b[i], sums);
    }
    // All threads wait here, because the next ranks overwrite the slab.
    __syncthreads();
  }
  for (int half = 0; half < 2; ++half) {
    Chunk after;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      after.elements[i] = BitsOf(Rounded(ElementOf(before[half], i) +
                                         matrix.scale * SumOf(sums, half, i)));
    }
    Save<kAligned>(after, y + half * kColumns * product.y_stride, own,
                   tile.features, exists[half]);
  }
}

__host__ __device__ inline int TilesOf(const LoraProjection& projection) {
  return static_cast<int>((projection.features + kBlockFeatures - 1) /
                          kBlockFeatures);
}

// Returns a tile by its number. Tiles are numbered projection by projection.
__device__ FeatureTile TileAt(const LoraFewRowsProduct& product, int number) {
  int which = 0;
  while (number >= TilesOf(product.projections[which])) {
    number -= TilesOf(product.projections[which++]);
  }
  const LoraProjection& projection = product.projections[which];
  return {.slot = projection.slot,
          .column = projection.column,
          .features = static_cast<int>(projection.features),
          .first = number * kBlockFeatures};
}

template <int kSteps>
__global__ void __launch_bounds__(kExpandThreads) ExpandKernel(Task task) {
  __shared__ Slab slab;
  const LoraFewRowsProduct& product = task.product;
  // Loads the block's first table entry before the kernel knows whether the
  // entry is used. The table has memory for max_few entries, so the address is
  // valid.
  LoraFewRows rows = product.table.few[blockIdx.x / task.tiles];
  const auto num_items =
      static_cast<unsigned>(*product.table.num_few * task.tiles);
  WaitForEarlierLaunches();
  for (unsigned item = blockIdx.x; item < num_items; item += gridDim.x) {
    if (item != blockIdx.x) rows = product.table.few[item / task.tiles];
    const FeatureTile tile =
        TileAt(product, static_cast<int>(item % task.tiles));
    const LoraMatrix matrix = MatrixOf(product.table, rows, tile.slot);
    if (matrix.rank == 0) continue;
    const bool is_aligned =
        IsAligned(static_cast<const Bf16*>(rows.weights) + matrix.offset,
                  matrix.rank) &&
        IsAligned(static_cast<const Bf16*>(product.y_TO) + tile.column,
                  product.y_stride) &&
        tile.features % kChunk == 0;
    if (is_aligned) {
      ExpandItem<true, kSteps>(task, rows, matrix, tile, &slab);
    } else {
      ExpandItem<false, kSteps>(task, rows, matrix, tile, &slab);
    }
  }
}

// Each block writes the S of one entry to shrunk_TR.
__global__ void __launch_bounds__(kExpandThreads) SumKernel(Task task) {
  const LoraFewRowsProduct& product = task.product;
  if (blockIdx.x >= *product.table.num_few) return;
  const LoraFewRows rows = product.table.few[blockIdx.x];
  const LoraMatrix matrix = MatrixOf(product.table, rows, product.slot_of_a);
  const int quads = (matrix.rank + kQuad - 1) / kQuad;
  const int count = rows.num_rows * quads * kSumLanes;
  // Whole warps stay in the loop, because SumOfParts needs all lanes.
  for (int i = static_cast<int>(threadIdx.x); i - Lane() < count;
       i += static_cast<int>(kExpandThreads)) {
    const int row = i / kSumLanes / quads;
    const int quad = i / kSumLanes % quads * kQuad;
    const float sum = SumOfParts(task.parts, rows, matrix, row,
                                 i < count ? quad : matrix.rank);
    const int rank = quad + i % kSumLanes;
    if (i >= count || rank >= matrix.rank) continue;
    KeepShrunk(product, rows, row, matrix.column + rank, Rounded(sum));
  }
}

}  // namespace
}  // namespace few_rows

cudaError_t RunLoraFewRowsExpand(const LoraFewRowsProduct& product,
                                 cudaStream_t stream) {
  using namespace few_rows;
  int64_t tiles = 0;
  for (int i = 0; i < product.num_projections; ++i) {
    tiles += TilesOf(product.projections[i]);
  }
  if (IsEmpty(product) || tiles == 0) return cudaSuccess;
  const auto kernel = product.max_projection_rank <= kDepth
                          ? ExpandKernel<1>
                          : ExpandKernel<kMostSteps>;
  return LaunchEarly(kernel, NumBlocks(product, tiles), 1, kExpandThreads,
                     stream, TaskOf(product, tiles));
}

cudaError_t RunLoraFewRowsSum(const LoraFewRowsProduct& product,
                              cudaStream_t stream) {
  using namespace few_rows;
  if (IsEmpty(product)) return cudaSuccess;
  return Launch(SumKernel, product.table.max_few, 1, kExpandThreads, stream,
                TaskOf(product, 0));
}

}  // namespace weft::kernels::cuda
