#include "kernels/cuda/device.cuh"
#include "kernels/cuda/lora_few_rows.h"
#include "kernels/cuda/warp_mma.cuh"

namespace weft::kernels::cuda {
namespace {

using Bf16 = __nv_bfloat16;

// A product of a warp: 16 rows, 8 columns, summed over 2 x 16 elements. Lane 4
// g
// + t has 16 bytes of row g, of row g + 8 and of column g, the t-th of each:
// sums do not care in which order the depth is multiplied, as long as both
// operands have the same.
constexpr int kRows = kLoraFewRows;
constexpr int kColumns = 8;
constexpr int kChunk = 8;
constexpr int kDepth = 4 * kChunk;
static_assert(kRows == 16);

constexpr int kShrinkWarps = 8;
constexpr unsigned kShrinkThreads = kShrinkWarps * kWarp;
// Products of a warp whose operands are on their way at once.
constexpr int kShrinkSteps = 4;
// Features of a part at least, and parts at most.
constexpr int64_t kPartFeatures = kShrinkWarps * kShrinkSteps * kDepth;
constexpr int64_t kMaxParts = 16;

constexpr int kExpandWarps = 4;
constexpr unsigned kExpandThreads = kExpandWarps * kWarp;
// Products side by side, so that a lane has 8 neighbouring features of y.
constexpr int kTiles = 4;
constexpr int kWarpFeatures = kTiles * kColumns;
constexpr int kBlockFeatures = kExpandWarps * kWarpFeatures;
// Ranks whose B is on its way at once.
constexpr int kSlab = 64;
constexpr int kSlabSteps = kSlab / kDepth;

// Blocks of a launch: more items than that are taken in turns, so that a table
// with room to spare costs no launch of empty blocks.
constexpr int64_t kMaxBlocks = 2048;

union Chunk {
  uint4 whole;
  unsigned pairs[kChunk / 2];
  uint16_t elements[kChunk];
};

// Elements [begin, begin + 8) of a row of `count`, zeros beyond it.
template <bool kAligned>
__device__ Chunk Load(const Bf16* row, int begin, int count, bool exists) {
  Chunk chunk = {};
  if (!exists || begin >= count) return chunk;
  if constexpr (kAligned) {
    chunk.whole = *reinterpret_cast<const uint4*>(row + begin);
  } else {
    const auto* bits = reinterpret_cast<const uint16_t*>(row);
    for (int i = 0; i < kChunk; ++i) {
      if (begin + i < count) chunk.elements[i] = bits[begin + i];
    }
  }
  return chunk;
}

// True when 16-byte loads reach all rows of a matrix.
__device__ bool IsAligned(const Bf16* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kChunk == 0;
}

__device__ void Multiply(const Chunk& upper, const Chunk& lower,
                         const Chunk& columns, float (&sums)[4]) {
  for (int half = 0; half < 2; ++half) {
    WarpMma(sums,
            {upper.pairs[2 * half], lower.pairs[2 * half],
             upper.pairs[2 * half + 1], lower.pairs[2 * half + 1]},
            {columns.pairs[2 * half], columns.pairs[2 * half + 1]});
  }
}

__device__ LoraMatrix MatrixOf(const LoraTable& table, const LoraFewRows& rows,
                               int64_t slot) {
  return table.matrices[rows.layout * table.num_slots + slot];
}

// A launch: the product, and what the host makes of its widths.
struct Task {
  LoraFewRowsProduct product;
  int inputs = 0;
  int part_features = 0;
  int num_parts = 0;
  unsigned tiles = 0;  // Items of one entry; of a part in the shrink.
};

// The ranks of one part of one row.
__device__ float* PartOf(const Task& task, const LoraFewRows& rows, int row,
                         int part) {
  const int64_t place = rows.place + row;
  return task.product.workspace +
         (place * task.num_parts + part) * task.product.max_rank;
}

// Adds this warp's steps of a part to its 16 x 8 sums.
template <bool kAligned>
__device__ void AddFeatures(const Task& task, const LoraFewRows& rows,
                            const LoraMatrix& matrix, int begin, int end,
                            int first_rank, float (&sums)[4]) {
  const LoraFewRowsProduct& product = task.product;
  const int g = Lane() / 4;
  const Bf16* upper = static_cast<const Bf16*>(product.x_TI) +
                      (rows.row + g) * product.x_stride;
  const Bf16* lower = upper + kColumns * product.x_stride;
  const Bf16* a = static_cast<const Bf16*>(rows.weights) + matrix.offset +
                  (first_rank + g) * product.inputs;
  constexpr int kStep = kShrinkWarps * kDepth;
  for (int base = begin + WarpIndex() * kDepth; base < end;
       base += kShrinkSteps * kStep) {
    Chunk chunks[kShrinkSteps][3];
#pragma unroll
    for (int i = 0; i < kShrinkSteps; ++i) {
      const int at = base + i * kStep + Lane() % 4 * kChunk;
      chunks[i][0] = Load<kAligned>(a, at, end, first_rank + g < matrix.rank);
      chunks[i][1] = Load<kAligned>(upper, at, end, g < rows.num_rows);
      chunks[i][2] =
          Load<kAligned>(lower, at, end, g + kColumns < rows.num_rows);
    }
#pragma unroll
    for (int i = 0; i < kShrinkSteps; ++i) {
      Multiply(chunks[i][1], chunks[i][2], chunks[i][0], sums);
    }
  }
}

// One item: the parts of up to 16 rows and 8 ranks, over some features.
__device__ void ShrinkItem(const Task& task, const LoraFewRows& rows,
                           const LoraMatrix& matrix, int part, int first_rank) {
  __shared__ float memory[kShrinkWarps][kRows * kColumns];
  const LoraFewRowsProduct& product = task.product;
  const int begin = part * task.part_features;
  const int end = begin + task.part_features < task.inputs
                      ? begin + task.part_features
                      : task.inputs;
  const bool is_aligned =
      IsAligned(static_cast<const Bf16*>(product.x_TI), product.x_stride) &&
      IsAligned(static_cast<const Bf16*>(rows.weights) + matrix.offset,
                product.inputs);
  float sums[4] = {};
  if (is_aligned) {
    AddFeatures<true>(task, rows, matrix, begin, end, first_rank, sums);
  } else {
    AddFeatures<false>(task, rows, matrix, begin, end, first_rank, sums);
  }
  for (int i = 0; i < 4; ++i) {
    const int row = Lane() / 4 + i / 2 * kColumns;
    memory[WarpIndex()][row * kColumns + Lane() % 4 * 2 + i % 2] = sums[i];
  }
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x) / kColumns;
  const int rank = first_rank + static_cast<int>(threadIdx.x) % kColumns;
  if (row < rows.num_rows && rank < matrix.rank) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kShrinkWarps; ++warp) {
      sum += memory[warp][threadIdx.x];
    }
    PartOf(task, rows, row, part)[matrix.column + rank] = matrix.scale * sum;
  }
  // Before the next item's sums overwrite these.
  __syncthreads();
}

__global__ void __launch_bounds__(kShrinkThreads) ShrinkKernel(Task task) {
  const LoraTable& table = task.product.table;
  const unsigned per_entry = task.tiles * task.num_parts;
  const auto num_items = static_cast<unsigned>(*table.num_few * per_entry);
  for (unsigned item = blockIdx.x; item < num_items; item += gridDim.x) {
    const LoraFewRows rows = table.few[item / per_entry];
    const LoraMatrix matrix = MatrixOf(table, rows, task.product.slot_of_a);
    const auto part = static_cast<int>(item % per_entry / task.tiles);
    const int first_rank = static_cast<int>(item % task.tiles) * kColumns;
    if (first_rank < matrix.rank) {
      ShrinkItem(task, rows, matrix, part, first_rank);
    }
  }
}

// One element of S.
__device__ float SumOfParts(const Task& task, const LoraFewRows& rows, int row,
                            int column) {
  const float* parts = PartOf(task, rows, row, 0) + column;
  float sum = 0;
#pragma unroll 8
  for (int part = 0; part < task.num_parts; ++part) {
    sum += parts[part * task.product.max_rank];
  }
  return sum;
}

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

// S of a slab of ranks in shared memory.
struct Slab {
  // Rows start at other banks.
  Chunk chunks[kRows][kSlab / kChunk + 1];
};

// The slab at rank `first` of a projection; zeros beyond its rank.
__device__ void FillSlab(const Task& task, const LoraFewRows& rows,
                         const LoraMatrix& matrix, int first, bool keeps,
                         Slab* slab) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kSlab;
       i += static_cast<int>(kExpandThreads)) {
    const int row = i / kSlab;
    const int rank = first + i % kSlab;
    Bf16 value = Rounded(0);
    if (row < rows.num_rows && rank < matrix.rank) {
      value = Rounded(SumOfParts(task, rows, row, matrix.column + rank));
      if (keeps) {
        KeepShrunk(task.product, rows, row, matrix.column + rank, value);
      }
    }
    slab->chunks[row][i % kSlab / kChunk].elements[i % kChunk] = BitsOf(value);
  }
}

// What one block adds to.
struct FeatureTile {
  int64_t slot;
  int64_t column;  // Of y.
  int features;    // Of the projection.
  int first;       // Of them.
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

// One item: up to 16 rows of y at kBlockFeatures features. Column c of product
// j is feature c / 2 * 8 + 2 j + c % 2 of the warp.
template <bool kAligned>
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
  for (int rank = 0; rank < matrix.rank; rank += kSlab) {
    Chunk b[kSlabSteps][kTiles];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int64_t feature = first + g / 2 * kChunk + 2 * j + g % 2;
      const Bf16* row = static_cast<const Bf16*>(rows.weights) + matrix.offset +
                        feature * matrix.rank;
#pragma unroll
      for (int i = 0; i < kSlabSteps; ++i) {
        b[i][j] = Load<kAligned>(row, rank + i * kDepth + t * kChunk,
                                 matrix.rank, feature < tile.features);
      }
    }
    const bool keeps = product.shrunk_TR != nullptr && tile.first == 0;
    FillSlab(task, rows, matrix, rank, keeps, slab);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSlabSteps; ++i) {
      const Chunk upper = slab->chunks[g][4 * i + t];
      const Chunk lower = slab->chunks[g + kColumns][4 * i + t];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) Multiply(upper, lower, b[i][j], sums[j]);
    }
    // Before the next slab overwrites this one.
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

// The tiles of one projection lie after those of the one before.
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

__global__ void __launch_bounds__(kExpandThreads) ExpandKernel(Task task) {
  __shared__ Slab slab;
  const LoraFewRowsProduct& product = task.product;
  const auto num_items =
      static_cast<unsigned>(*product.table.num_few * task.tiles);
  for (unsigned item = blockIdx.x; item < num_items; item += gridDim.x) {
    const LoraFewRows rows = product.table.few[item / task.tiles];
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
      ExpandItem<true>(task, rows, matrix, tile, &slab);
    } else {
      ExpandItem<false>(task, rows, matrix, tile, &slab);
    }
  }
}

// Block: one entry.
__global__ void __launch_bounds__(kExpandThreads) SumKernel(Task task) {
  const LoraFewRowsProduct& product = task.product;
  if (blockIdx.x >= *product.table.num_few) return;
  const LoraFewRows rows = product.table.few[blockIdx.x];
  const LoraMatrix matrix = MatrixOf(product.table, rows, product.slot_of_a);
  for (int i = static_cast<int>(threadIdx.x); i < rows.num_rows * matrix.rank;
       i += static_cast<int>(kExpandThreads)) {
    const int row = i / matrix.rank;
    const int column = matrix.column + i % matrix.rank;
    KeepShrunk(product, rows, row, column,
               Rounded(SumOfParts(task, rows, row, column)));
  }
}

bool IsEmpty(const LoraFewRowsProduct& product) {
  return product.table.max_few == 0 || product.max_rank == 0;
}

int64_t PartFeatures(int64_t inputs) {
  const int64_t most = CeilDiv(inputs, kMaxParts * kDepth) * kDepth;
  return most > kPartFeatures ? most : kPartFeatures;
}

Task TaskOf(const LoraFewRowsProduct& product, int64_t tiles) {
  const int64_t part_features = PartFeatures(product.inputs);
  return {.product = product,
          .inputs = static_cast<int>(product.inputs),
          .part_features = static_cast<int>(part_features),
          .num_parts = static_cast<int>(CeilDiv(product.inputs, part_features)),
          .tiles = static_cast<unsigned>(tiles)};
}

int64_t NumBlocks(const LoraFewRowsProduct& product, int64_t items_per_entry) {
  const int64_t items = product.table.max_few * items_per_entry;
  return items < kMaxBlocks ? items : kMaxBlocks;
}

}  // namespace

int64_t LoraFewRowsWorkspace(const LoraFewRowsProduct& product) {
  return product.table.max_few_rows * TaskOf(product, 0).num_parts *
         product.max_rank;
}

cudaError_t RunLoraFewRowsShrink(const LoraFewRowsProduct& product,
                                 cudaStream_t stream) {
  const Task task = TaskOf(product, CeilDiv(product.max_rank, kColumns));
  const int64_t per_entry = int64_t{task.tiles} * task.num_parts;
  if (IsEmpty(product) || per_entry == 0) return cudaSuccess;
  return Launch(ShrinkKernel, NumBlocks(product, per_entry), 1, kShrinkThreads,
                stream, task);
}

cudaError_t RunLoraFewRowsExpand(const LoraFewRowsProduct& product,
                                 cudaStream_t stream) {
  int64_t tiles = 0;
  for (int i = 0; i < product.num_projections; ++i) {
    tiles += TilesOf(product.projections[i]);
  }
  if (IsEmpty(product) || tiles == 0) return cudaSuccess;
  return Launch(ExpandKernel, NumBlocks(product, tiles), 1, kExpandThreads,
                stream, TaskOf(product, tiles));
}

cudaError_t RunLoraFewRowsSum(const LoraFewRowsProduct& product,
                              cudaStream_t stream) {
  if (IsEmpty(product)) return cudaSuccess;
  return Launch(SumKernel, product.table.max_few, 1, kExpandThreads, stream,
                TaskOf(product, 0));
}

}  // namespace weft::kernels::cuda
