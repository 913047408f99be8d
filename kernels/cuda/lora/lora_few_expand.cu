#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora/lora_few_rows.cuh"

namespace weft::kernels::cuda {
namespace few_rows {
namespace {

// The values of four adjacent ranks in one row of S, in f32. They are from one
// part of S, or they are sums over parts.
constexpr int kQuad = 4;
union Quad {
  uint4 whole;
  float values[kQuad];
};

// kSumLanes adjacent lanes compute the sums of a quad of ranks. The l-th of
// these lanes adds the parts l, l + kSumLanes and so on, in order, and loads
// kPartsAtOnce of them at once. Then the lanes add their sums, and each lane
// keeps the sum of one rank.
constexpr int kSumLanes = kQuad;
constexpr int kPartsAtOnce = 4;

// Adds the lane's parts of a quad to `sum`. With kAligned, loads all ranks of
// the quad at once. Otherwise loads only its first `ranks` ranks. `from` is
// where the quad begins in part 0.
template <bool kAligned>
__device__ void AddParts(const LoraParts& parts, const float* from, int ranks,
                         Quad* sum) {
  const int stride = static_cast<int>(parts.stride);
  // Unrolling this loop would take registers away from the caller's operands.
#pragma unroll 1
  for (int first = Lane() % kSumLanes; first < parts.count;
       first += kSumLanes * kPartsAtOnce) {
    Quad loaded[kPartsAtOnce];
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      loaded[i] = {};
      const int part = first + i * kSumLanes;
      if (part >= parts.count) continue;
      if constexpr (kAligned) {
        loaded[i].whole = *reinterpret_cast<const uint4*>(from + part * stride);
      } else {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          if (j < ranks) loaded[i].values[j] = from[part * stride + j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) sum->values[j] += loaded[i].values[j];
    }
  }
}

// Returns the value of S, in f32, at row `row` of the entry and at the lane's
// rank. The quad begins at `rank`, and the lane's rank is
// rank + Lane() % kSumLanes. Returns 0 if the lane's rank is beyond the matrix.
// All lanes of the warp call it.
__device__ float SumOfParts(const LoraParts& parts, const LoraFewRows& rows,
                            const LoraMatrix& matrix, int row, int rank) {
  Quad sum = {};
  // Loads nothing if the whole quad is beyond the matrix, because the quad may
  // then be beyond the end of the part.
  if (rank < matrix.rank) {
    const int column = matrix.column + rank;
    const float* from = PartOf(parts, rows, row, 0) + column;
    if (column % kQuad == 0) {
      AddParts<true>(parts, from, kQuad, &sum);
    } else {
      AddParts<false>(parts, from, matrix.rank - rank, &sum);
    }
  }
  float own = 0;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
#pragma unroll
    for (int offset = 1; offset < kSumLanes; offset *= 2) {
      sum.values[j] += __shfl_xor_sync(kAllLanes, sum.values[j], offset);
    }
    // Leaves out ranks beyond this matrix, because a 16-byte load may have read
    // them.
    if (Lane() % kSumLanes == j && rank + j < matrix.rank) own = sum.values[j];
  }
  return own;
}

// The number of products of 16 rows and 8 features that a warp computes side by
// side. With 4 products, each lane has 8 adjacent features of y.
constexpr int kTiles = 4;
constexpr int kWarpFeatures = kTiles * kColumns;
using WarpSums = float[kTiles][4];

// Returns the lane's sum for the i-th of its 8 features, in its upper row
// (lower = 0) or in its lower row (lower = 1).
__device__ float SumOf(const WarpSums& sums, int lower, int i) {
  return sums[i / 2][2 * lower + i % 2];
}

// The most steps of kDepth ranks of B that a warp loads at once. If all ranks
// fit in one step, ExpandKernel<1> runs instead, because more of its warps fit
// on a multiprocessor.
constexpr int kMostSteps = 2;

// Some ranks of an entry's S as bf16, in shared memory.
constexpr int kSlabRanks = kMostSteps * kDepth;
struct Slab {
  // Rows are padded, so that they start in different banks.
  Chunk chunks[kRows][kSlabRanks / kChunk + 1];
};

// Fills the slab with at most kMost ranks of a projection's S, from `first` on.
// Pads the ranks with zeros to a whole step of kDepth ranks. Calls keep(row,
// rank, value) for each element of S that it reads. The slab's rows beyond the
// entry keep old values, and no kernel uses their products.
template <int kMost, typename Keep>
__device__ void FillSlab(const LoraParts& parts, const LoraFewRows& rows,
                         const LoraMatrix& matrix, int first, Keep keep,
                         Slab* slab) {
  const int left = matrix.rank - first;
  const int ranks = left < kMost ? left : kMost;
  const int quads = (ranks + kDepth - 1) / kDepth * (kDepth / kQuad);
  // SumOfParts needs all lanes. Each kDepth ranks of a row take a whole warp,
  // so the lanes of a warp leave the loop together.
  static_assert(kDepth / kQuad * kSumLanes % kWarp == 0 && kMost <= kSlabRanks);
  for (int i = static_cast<int>(threadIdx.x);
       i < rows.num_rows * quads * kSumLanes;
       i += static_cast<int>(blockDim.x)) {
    const int row = i / kSumLanes / quads;
    const int quad = i / kSumLanes % quads * kQuad;
    const int rank = quad + i % kSumLanes;
    const Bf16 value =
        Rounded(SumOfParts(parts, rows, matrix, row, first + quad));
    slab->chunks[row][rank / kChunk].elements[rank % kChunk] = BitsOf(value);
    if (first + rank < matrix.rank) keep(row, first + rank, value);
  }
}

// Loads one step of B, ranks [rank, rank + kDepth), for the warp's 32 features
// from `first` on. Column c of product j is feature first + c / 2 * 8 + 2 j + c
// % 2.
template <bool kAligned>
__device__ void LoadStep(const LoraFewRows& rows, const LoraMatrix& matrix,
                         int features, int first, int rank,
                         Chunk (&b)[kTiles]) {
  const int g = Lane() / 4;
  const Bf16* from = static_cast<const Bf16*>(rows.weights) + matrix.offset;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const int feature = first + g / 2 * kChunk + 2 * j + g % 2;
    b[j] =
        Load<kAligned>(from + feature * matrix.rank, rank + Lane() % 4 * kChunk,
                       matrix.rank, feature < features);
  }
}

// Multiplies step `step` of the slab's ranks by the same ranks of B, which are
// in `b`. Adds the product to the warp's sums.
__device__ void MultiplyStep(const Slab& slab, int step,
                             const Chunk (&b)[kTiles], WarpSums& sums) {
  const int chunk = step * kDepth / kChunk + Lane() % 4;
  const Chunk upper = slab.chunks[Lane() / 4][chunk];
  const Chunk lower = slab.chunks[Lane() / 4 + kColumns][chunk];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) Multiply(upper, lower, b[j], sums[j]);
}

constexpr int kExpandWarps = 4;
constexpr unsigned kExpandThreads = kExpandWarps * kWarp;
constexpr int kBlockFeatures = kExpandWarps * kWarpFeatures;
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
