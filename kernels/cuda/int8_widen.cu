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

// Widens chunks of kInt8Chunk numbers. A lane loads one chunk. kPacks adjacent
// lanes exchange their chunks, so that they store adjacent packs of 16 bytes
// together: first the packs of the first lane's chunk, then those of the next.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) WidenInt8Kernel(Task<T> task) {
  constexpr int kPacks = kInt8Chunk / kWidth<T>;
  constexpr int kPackWords = kWidth<T> / 4;  // Words of integers for one pack.
  WaitForEarlierLaunches();
  const int64_t num_chunks = (task.count + kInt8Chunk - 1) / kInt8Chunk;
  const int64_t chunk = PlaceInRow();
  Int8Chunk integers = {};
  float scale = 0;
  if (chunk < num_chunks) {
    const int8_t* row = task.weight.rows_OB + blockIdx.x * task.weight.stride;
    const int64_t input = task.begin + chunk * kInt8Chunk;
    integers.whole = *reinterpret_cast<const uint4*>(row + input);
    scale =
        ScaleOf(ScaleBitsOf(row, task.weight.inputs, input / cpu::kInt8Group));
  }
  const int own = Lane() % kPacks;
  T* const wide = task.wide + blockIdx.x * task.count;
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
    const int64_t to = (chunk - own + i) * kInt8Chunk + own * kWidth<T>;
    if (to < task.count) StorePack(pack, wide + to);
  }
}

}  // namespace

bool TakesInt8(const Int8Weight& weight) {
  return IsWide<int8_t>(weight.rows_OB, weight.stride) &&
         weight.inputs % kWidth<__nv_bfloat16> == 0;
}

cudaError_t WidenInt8Rows(const Int8Weight& weight, int64_t begin, int64_t end,
                          DType dtype, void* wide, cudaStream_t stream) {
  const int64_t count = end - begin;
  if (begin % cpu::kInt8Group != 0 || !TakesInt8(weight)) {
    return cudaErrorInvalidValue;
  }
  if (weight.outputs == 0 || count == 0) return cudaSuccess;
  return WithType(dtype, [&]<typename T>(const T*) {
    if (!IsWide<T>(wide, count)) return cudaErrorInvalidValue;
    const Task<T> task = {.weight = weight,
                          .begin = begin,
                          .count = count,
                          .wide = static_cast<T*>(wide)};
    const int64_t chunks = CeilDiv(count, kInt8Chunk);
    const unsigned threads = PackThreads(chunks, 1, kMostThreads);
    return LaunchEarly(WidenInt8Kernel<T>, weight.outputs,
                       CeilDiv(chunks, threads), threads, stream, task);
  });
}

}  // namespace weft::kernels::cuda
