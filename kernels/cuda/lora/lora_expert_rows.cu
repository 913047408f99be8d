#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora/lora_expert_rows.h"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 512;
// The rows of an entry are in one window of kLoraFewRows rows, so that a thread
// finds the end of its entry among the rows of the other threads.
static_assert(kThreads % kLoraFewRows == 0);

// What the rows of one entry share. Without an adapter, `weights` is null.
struct Owner {
  const void* weights;
  int32_t layout;
};

__device__ bool IsSame(const Owner& a, const Owner& b) {
  return a.weights == b.weights && a.layout == b.layout;
}

// Returns the entry of the batch's table that has the token's row, or null.
__device__ const LoraFewRows* EntryOf(const LoraTable& batch, int64_t token) {
  int64_t begin = 0, end = *batch.num_few;  // The first entry beyond `token`.
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (batch.few[middle].row <= token) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  if (begin == 0) return nullptr;
  const LoraFewRows* entry = batch.few + begin - 1;
  return token < entry->row + entry->num_rows ? entry : nullptr;
}

__device__ Owner OwnerOf(const LoraExpertRows& rows, int64_t row) {
  const int64_t pair = rows.pairs_N[row];
  const LoraFewRows* entry = EntryOf(rows.batch, pair / rows.per_token);
  if (entry == nullptr) return {};
  const LoraMatrix* slots =
      rows.batch.matrices + entry->layout * rows.batch.num_slots;
  if (slots[rows.slot_of_gate_up].rank == 0 &&
      slots[rows.slot_of_down].rank == 0) {
    return {};
  }
  return {
      .weights = static_cast<const __nv_bfloat16*>(entry->weights) +
                 rows.experts_TK[pair] * slots[rows.slot_of_distance].offset,
      .layout = entry->layout};
}

__global__ void __launch_bounds__(kThreads)
    FindLoraExpertRowsKernel(LoraExpertRows rows) {
  __shared__ Owner owners[kThreads];
  const auto thread = static_cast<int>(threadIdx.x);
  const auto window = static_cast<int>(kLoraFewRows);
  uint64_t num_found = 0;
  for (int64_t first = 0; first < rows.num_rows; first += kThreads) {
    const int64_t row = first + thread;
    const Owner own = row < rows.num_rows ? OwnerOf(rows, row) : Owner{};
    owners[thread] = own;
    __syncthreads();
    const bool begins =
        own.weights != nullptr &&
        (thread % window == 0 || !IsSame(owners[thread - 1], own));
    int count = 1;
    while (begins && (thread + count) % window != 0 &&
           IsSame(owners[thread + count], own)) {
      ++count;
    }
    uint64_t total = 0;
    const uint64_t before = num_found + BlockScan(begins ? 1 : 0, &total);
    if (begins) {
      rows.few[before] = {.weights = own.weights,
                          .row = row,
                          .num_rows = count,
                          .layout = own.layout,
                          .place = static_cast<int32_t>(row)};
    }
    num_found += total;
  }
  if (thread == 0) *rows.num_few = static_cast<int64_t>(num_found);
}

}  // namespace

cudaError_t FindLoraExpertRows(const LoraExpertRows& rows,
                               cudaStream_t stream) {
  return Launch(FindLoraExpertRowsKernel, 1, 1, kThreads, stream, rows);
}

}  // namespace weft::kernels::cuda
