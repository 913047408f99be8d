// Prefix sums over a warp and over a block, a search by prefix sum, and a test
// whether a block is the last of several to finish.
#ifndef WEFT_KERNELS_CUDA_BLOCK_SCAN_CUH_
#define WEFT_KERNELS_CUDA_BLOCK_SCAN_CUH_

#include "kernels/cuda/device.cuh"

namespace weft::kernels::cuda {

// Returns the sum of `value` over the lanes up to and including this one. All
// lanes call it.
__device__ inline uint64_t WarpScan(uint64_t value) {
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, value, offset);
    if (Lane() >= offset) value += other;
  }
  return value;
}

// Returns the sum of `value` over the threads before this one. Sets `total` to
// the sum over all threads. All threads call it.
__device__ inline uint64_t BlockScan(uint64_t value, uint64_t* total) {
  __shared__ uint64_t sums[kMaxWarps];
  const uint64_t in_warp = WarpScan(value);
  if (Lane() == kWarp - 1) sums[WarpIndex()] = in_warp;
  __syncthreads();
  uint64_t before = in_warp - value;
  *total = 0;
  for (int warp = 0; warp < NumWarps(); ++warp) {
    if (warp < WarpIndex()) before += sums[warp];
    *total += sums[warp];
  }
  // All threads wait here, because the next call overwrites `sums`, which other
  // threads may still read.
  __syncthreads();
  return before;
}

// The result of FindInOrder: the index of the found item, and the target minus
// the measures of all earlier items.
struct Place {
  int item;
  uint64_t rest;  // From 1 to measure(item).
};

// Returns the first of `size` items at which the running sum of measure(item)
// reaches `target`. `target` is at least 1 and at most the sum over all items.
// All threads call it.
template <typename Measure>
__device__ Place FindInOrder(int size, uint64_t target, Measure measure) {
  __shared__ Place found;
  const auto threads = static_cast<int>(blockDim.x);
  const int each = (size + threads - 1) / threads;
  const int begin = static_cast<int>(threadIdx.x) * each;
  const int end = begin + each < size ? begin + each : size;
  uint64_t own = 0;
  for (int item = begin; item < end; ++item) own += measure(item);
  uint64_t total = 0;
  const uint64_t before = BlockScan(own, &total);
  if (before < target && target - before <= own) {
    Place place = {begin, target - before};
    while (place.rest > measure(place.item)) {
      place.rest -= measure(place.item++);
    }
    found = place;
  }
  __syncthreads();
  const Place place = found;
  // All threads wait here, because the next call overwrites `found`, which
  // other threads may still read.
  __syncthreads();
  return place;
}

// Returns true only in the block that calls it last among the `num_blocks`
// blocks that share `counter`. That block sees everything that the others wrote
// before their calls. `counter` is 0 before the first call and after the last.
// All threads of each block call it.
__device__ inline bool IsLastBlock(unsigned* counter, unsigned num_blocks) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(counter, 1U) == num_blocks - 1;
    if (is_last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_BLOCK_SCAN_CUH_
