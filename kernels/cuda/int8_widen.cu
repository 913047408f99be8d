#include "kernels/cpu/int8_rows.h"
#include "kernels/cuda/int8_weight.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kMostThreads = 256;

// The inputs [begin, begin + count) of a weight, and where they go.
template <typename T>
struct Task {
  Int8Weight weight;
  int64_t begin = 0;
  int64_t count = 0;
  T* wide = nullptr;
};

// Returns the thread's place in its row. The row's index is blockIdx.x.
__device__ int64_t PlaceInRow() {
  return int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
}

// Widens single numbers.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) WidenInt8Kernel(Task<T> task) {
  WaitForEarlierLaunches();
  const int64_t at = PlaceInRow();
  if (at >= task.count) return;
  const int64_t input = task.begin + at;
  const int8_t* row = task.weight.rows_OB + blockIdx.x * task.weight.stride;
  Store(static_cast<float>(row[input]) *
            ScaleOf<false>(row, task.weight.inputs, input / cpu::kInt8Group),
        task.wide + blockIdx.x * task.count + at);
}

// Widens chunks of kInt8Chunk numbers. A lane loads one chunk. kPacks adjacent
// lanes exchange their chunks, so that they store adjacent packs of 16 bytes
// together: first the packs of the first lane's chunk, then those of the next.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    WidenInt8ChunksKernel(Task<T> task) {
  constexpr int kPacks = kInt8Chunk / kWidth<T>;
  constexpr int kPackWords = kWidth<T> / 4;  // Words of integers for one pack.
  WaitForEarlierLaunches();
  const int64_t num_chunks = task.count / kInt8Chunk;
  const int64_t chunk = PlaceInRow();
  Int8Chunk integers = {};
  float scale = 0;
  if (chunk < num_chunks) {
    const int8_t* row = task.weight.rows_OB + blockIdx.x * task.weight.stride;
    const int64_t input = task.begin + chunk * kInt8Chunk;
    integers.whole = *reinterpret_cast<const uint4*>(row + input);
    scale = ScaleOf<true>(row, task.weight.inputs, input / cpu::kInt8Group);
  }
  const int own = Lane() % kPacks;
  T* const wide = task.wide + blockIdx.x * task.count + own * kWidth<T>;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int from = Lane() - own + i;
    unsigned words[kInt8Chunk / 4];
#pragma unroll
    for (int k = 0; k < kInt8Chunk / 4; ++k) {
      words[k] = __shfl_sync(kAllLanes, integers.words[k], from);
    }
    const float pack_scale = __shfl_sync(kAllLanes, scale, from);
    Pack<T, kWidth<T>> pack;
#pragma unroll
    for (int k = 0; k < kWidth<T>; ++k) {
      unsigned word = 0;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (p == own) word = words[p * kPackWords + k / 4];
      }
      const auto integer = static_cast<int8_t>(word >> 8 * (k % 4));
      pack.Set(k, static_cast<float>(integer) * pack_scale);
    }
    const int64_t to = chunk - own + i;
    if (to < num_chunks) StorePack(pack, wide + to * kInt8Chunk);
  }
}

}  // namespace

cudaError_t WidenInt8Rows(const Int8Weight& weight, int64_t begin, int64_t end,
                          DType dtype, void* wide, cudaStream_t stream) {
  const int64_t count = end - begin;
  if (begin % cpu::kInt8Group != 0) return cudaErrorInvalidValue;
  if (weight.outputs == 0 || count == 0) return cudaSuccess;
  return WithType(dtype, [&]<typename T>(const T*) {
    const Task<T> task = {.weight = weight,
                          .begin = begin,
                          .count = count,
                          .wide = static_cast<T*>(wide)};
    const bool is_wide = HasWideRows(weight) && count % kInt8Chunk == 0 &&
                         IsWide<T>(wide, count);
    const int64_t items = is_wide ? count / kInt8Chunk : count;
    const unsigned threads = PackThreads(items, 1, kMostThreads);
    return LaunchEarly(is_wide ? WidenInt8ChunksKernel<T> : WidenInt8Kernel<T>,
                       weight.outputs, CeilDiv(items, threads), threads, stream,
                       task);
  });
}

}  // namespace weft::kernels::cuda
