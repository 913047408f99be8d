#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora/lora_few_rows.cuh"

namespace weft::kernels::cuda {
namespace few_rows {
namespace {

constexpr int kShrinkWarps = 8;
constexpr unsigned kShrinkThreads = kShrinkWarps * kWarp;
// A warp loads the operands of kShrinkSteps products before it computes the
// first product. If the operands are not aligned, it loads and computes one
// product at a time.
constexpr int kShrinkSteps = 4;
// Blocks per multiprocessor. Without this number the compiler would use too few
// registers and move loads behind the products.
constexpr int kShrinkBlocks = 3;
static_assert(kPartFeatures == kShrinkWarps * kShrinkSteps * kDepth);

// Adds x A^T over the warp's share of the features [begin, end) to the warp's
// 16 x 8 sums.
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
  constexpr int kSteps = kAligned ? kShrinkSteps : 1;
  constexpr int kStep = kShrinkWarps * kDepth;
  for (int base = begin + WarpIndex() * kDepth; base < end;
       base += kSteps * kStep) {
    Chunk chunks[kSteps][3];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int at = base + i * kStep + Lane() % 4 * kChunk;
      chunks[i][0] = Load<kAligned>(a, at, end, first_rank + g < matrix.rank);
      chunks[i][1] = Load<kAligned>(upper, at, end, g < rows.num_rows);
      chunks[i][2] =
          Load<kAligned>(lower, at, end, g + kColumns < rows.num_rows);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      Multiply(chunks[i][1], chunks[i][2], chunks[i][0], sums);
    }
  }
}

// Computes one item: part `part` of S, for up to 16 rows and for the 8 ranks
// from `first_rank` on.
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
    PartOf(task.parts, rows, row, part)[matrix.column + rank] =
        matrix.scale * sum;
  }
  // All threads wait here, because the next item's sums overwrite `memory`.
  __syncthreads();
}

__global__ void __launch_bounds__(kShrinkThreads, kShrinkBlocks)
    ShrinkKernel(Task task) {
  const LoraTable& table = task.product.table;
  const unsigned per_entry = task.tiles * task.parts.count;
  // Loads the block's first table entry before the kernel knows whether the
  // entry is used. The table has memory for max_few entries, so the address is
  // valid.
  LoraFewRows rows = table.few[blockIdx.x / per_entry];
  const auto num_items = static_cast<unsigned>(*table.num_few * per_entry);
  WaitForEarlierLaunches();
  for (unsigned item = blockIdx.x; item < num_items; item += gridDim.x) {
    if (item != blockIdx.x) rows = table.few[item / per_entry];
    const LoraMatrix matrix = MatrixOf(table, rows, task.product.slot_of_a);
    const auto part = static_cast<int>(item % per_entry / task.tiles);
    const int first_rank = static_cast<int>(item % task.tiles) * kColumns;
    if (first_rank < matrix.rank) {
      ShrinkItem(task, rows, matrix, part, first_rank);
    }
  }
}

}  // namespace
}  // namespace few_rows

LoraParts LoraFewRowsParts(const LoraFewRowsProduct& product) {
  const int64_t features = few_rows::PartFeatures(product.inputs);
  return {.data = product.workspace,
          .count = static_cast<int>(CeilDiv(product.inputs, features)),
          .stride = LoraPartStride(product.max_rank)};
}

int64_t LoraFewRowsWorkspace(const LoraFewRowsProduct& product) {
  const LoraParts parts = LoraFewRowsParts(product);
  return product.table.max_few_rows * parts.count * parts.stride;
}

cudaError_t RunLoraFewRowsShrink(const LoraFewRowsProduct& product,
                                 cudaStream_t stream) {
  using namespace few_rows;
  const Task task = TaskOf(product, CeilDiv(product.max_rank, kColumns));
  const int64_t per_entry = int64_t{task.tiles} * task.parts.count;
  if (IsEmpty(product) || per_entry == 0) return cudaSuccess;
  return LaunchEarly(ShrinkKernel, NumBlocks(product, per_entry), 1,
                     kShrinkThreads, stream, task);
}

}  // namespace weft::kernels::cuda
