#include "kernels/cuda/lora_few_rows.cuh"

namespace weft::kernels::cuda {
namespace few_rows {
namespace {

constexpr int kExpandWarps = 4;
constexpr unsigned kExpandThreads = kExpandWarps * kWarp;
// The number of adjacent products, chosen so that a lane has 8 adjacent
// features of y.
constexpr int kTiles = 4;
constexpr int kWarpFeatures = kTiles * kColumns;
constexpr int kBlockFeatures = kExpandWarps * kWarpFeatures;
// The most steps that a slab of ranks has. The B of a slab is loaded at once.
// If all ranks fit in one step, a slab has one step, so that more warps fit on
// a device.
constexpr int kMostSteps = 2;

__device__ void KeepShrunk(const LoraFewRowsProduct& product,
                           const LoraFewRows& rows, int row, int column,
                           Bf16 value) {
  static_cast<Bf16*>(
      product.shrunk_TR)[(rows.row + row) * product.shrunk_stride + column] =
      value;
}

__device__ Bf16 Rounded(float x) { return __float2bfloat16_rn(x); }
__device__ uint16_t BitsOf(Bf16 x) {
  uint16_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Four ranks of one row of S, with zeros beyond the matrix.
constexpr int kQuad = 4;
union Quad {
  uint4 whole;
  float values[kQuad];
};

// The number of parts that are loaded at once.
constexpr int kPartsAtOnce = 4;

__device__ Quad SumOfParts(const Task& task, const LoraFewRows& rows,
                           const LoraMatrix& matrix, int row, int rank) {
  // A part holds no ranks after the last matrix's last rank, rounded up to
  // four.
  if (rank >= matrix.rank) return {};
  const int column = matrix.column + rank;
  const float* from = PartOf(task, rows, row, 0) + column;
  const bool is_aligned = column % kQuad == 0;
  Quad sum = {};
  for (int first = 0; first < task.num_parts; first += kPartsAtOnce) {
    Quad parts[kPartsAtOnce];
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      parts[i] = {};
      if (first + i >= task.num_parts) continue;
      const float* part = from + (first + i) * task.part_stride;
      if (is_aligned) {
        parts[i].whole = *reinterpret_cast<const uint4*>(part);
      } else {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          if (rank + j < matrix.rank) parts[i].values[j] = part[j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) sum.values[j] += parts[i].values[j];
    }
  }
  // Clears ranks beyond this matrix, which the wide load may have read.
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    if (rank + j >= matrix.rank) sum.values[j] = 0;
  }
  return sum;
}

// A slab of ranks of S, in shared memory.
struct Slab {
  // Padded, so that rows start at different banks.
  Chunk chunks[kRows][kMostSteps * kDepth / kChunk + 1];
};

// Fills the slab with the ranks of a projection from `first` on. Rows outside
// segments keep old values, and their results are not used.
template <int kSteps>
__device__ void FillSlab(const Task& task, const LoraFewRows& rows,
                         const LoraMatrix& matrix, int first, bool keeps,
                         Slab* slab) {
  const int steps = matrix.rank - first > kDepth ? kSteps : 1;
  const int quads = steps * kDepth / kQuad;
  for (int i = static_cast<int>(threadIdx.x); i < rows.num_rows * quads;
       i += static_cast<int>(kExpandThreads)) {
    const int row = i / quads;
    const int rank = i % quads * kQuad;
    const Quad sum = SumOfParts(task, rows, matrix, row, first + rank);
    Chunk& chunk = slab->chunks[row][rank / kChunk];
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const Bf16 value = Rounded(sum.values[j]);
      chunk.elements[rank % kChunk + j] = BitsOf(value);
      if (keeps && first + rank + j < matrix.rank) {
        KeepShrunk(task.product, rows, row, matrix.column + first + rank + j,
                   value);
      }
    }
  }
}

// The features of a projection to which one block adds.
struct FeatureTile {
  int64_t slot;
  int64_t column;  // Where the projection begins in y.
  int features;    // Number of the projection's features.
  int first;       // First feature of the tile.
};

template <bool kAligned>
__device__ void AddToRow(const Chunk& before, const float (&sums)[kTiles][4],
                         int lower, float scale, int count, bool exists,
                         Bf16* y) {
  if (!exists || count <= 0) return;
  Chunk after;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    Bf16 old;
    memcpy(&old, &before.elements[i], sizeof old);
    after.elements[i] =
        BitsOf(Rounded(ToFloat(old) + scale * sums[i / 2][2 * lower + i % 2]));
  }
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(y) = after.whole;
  } else {
    auto* bits = reinterpret_cast<uint16_t*>(y);
    for (int i = 0; i < kChunk; ++i) {
      if (i < count) bits[i] = after.elements[i];
    }
  }
}

// Computes one item: up to 16 rows of y at kBlockFeatures features. Column c of
// product j is the warp's feature c / 2 * 8 + 2 j + c % 2.
template <bool kAligned, int kSteps>
__device__ void ExpandItem(const Task& task, const LoraFewRows& rows,
                           const LoraMatrix& matrix, const FeatureTile& tile,
                           Slab* slab) {
  const LoraFewRowsProduct& product = task.product;
  const int g = Lane() / 4;
  const int t = Lane() % 4;
  const int first = tile.first + WarpIndex() * kWarpFeatures;
  const int own = first + t * kChunk;
  Bf16* y = static_cast<Bf16*>(product.y_TO) +
            (rows.row + g) * product.y_stride + tile.column;
  const bool exists[2] = {g < rows.num_rows, g + kColumns < rows.num_rows};
  Chunk before[2];
  for (int i = 0; i < 2; ++i) {
    before[i] = Load<kAligned>(y + i * kColumns * product.y_stride, own,
                               tile.features, exists[i]);
  }
  float sums[kTiles][4] = {};
  for (int rank = 0; rank < matrix.rank; rank += kSteps * kDepth) {
    Chunk b[kSteps][kTiles];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int64_t feature = first + g / 2 * kChunk + 2 * j + g % 2;
      const Bf16* row = static_cast<const Bf16*>(rows.weights) + matrix.offset +
                        feature * matrix.rank;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        b[i][j] = Load<kAligned>(row, rank + i * kDepth + t * kChunk,
                                 matrix.rank, feature < tile.features);
      }
    }
    const bool keeps = product.shrunk_TR != nullptr && tile.first == 0;
    FillSlab<kSteps>(task, rows, matrix, rank, keeps, slab);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (rank + i * kDepth >= matrix.rank) break;
      const Chunk upper = slab->chunks[g][4 * i + t];
      const Chunk lower = slab->chunks[g + kColumns][4 * i + t];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) Multiply(upper, lower, b[i][j], sums[j]);
    }
    // The next slab overwrites this one, so all threads wait here.
    __syncthreads();
  }
  for (int i = 0; i < 2; ++i) {
    AddToRow<kAligned>(before[i], sums, i, matrix.scale, tile.features - own,
                       exists[i], y + i * kColumns * product.y_stride + own);
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
  // The table has memory for the largest number of entries. So the first entry
  // can be loaded before the kernel knows whether the entry exists.
  LoraFewRows rows = product.table.few[blockIdx.x / task.tiles];
  const auto num_items =
      static_cast<unsigned>(*product.table.num_few * task.tiles);
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

// Each block computes one entry.
__global__ void __launch_bounds__(kExpandThreads) SumKernel(Task task) {
  const LoraFewRowsProduct& product = task.product;
  if (blockIdx.x >= *product.table.num_few) return;
  const LoraFewRows rows = product.table.few[blockIdx.x];
  const LoraMatrix matrix = MatrixOf(product.table, rows, product.slot_of_a);
  const int quads = (matrix.rank + kQuad - 1) / kQuad;
  for (int i = static_cast<int>(threadIdx.x); i < rows.num_rows * quads;
       i += static_cast<int>(kExpandThreads)) {
    const int row = i / quads;
    const int rank = i % quads * kQuad;
    const Quad sum = SumOfParts(task, rows, matrix, row, rank);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      if (rank + j >= matrix.rank) continue;
      KeepShrunk(product, rows, row, matrix.column + rank + j,
                 Rounded(sum.values[j]));
    }
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
  return Launch(kernel, NumBlocks(product, tiles), 1, kExpandThreads, stream,
                TaskOf(product, tiles));
}

cudaError_t RunLoraFewRowsSum(const LoraFewRowsProduct& product,
                              cudaStream_t stream) {
  using namespace few_rows;
  if (IsEmpty(product)) return cudaSuccess;
  return Launch(SumKernel, product.table.max_few, 1, kExpandThreads, stream,
                TaskOf(product, 0));
}

}  // namespace weft::kernels::cuda
