// Functions that the kernels share: conversion of elements to and from f32, and
// reductions over a warp and a block. A reduction combines values in a fixed
// order, so that the same input gives the same bits. Blocks are one-dimensional
// and have whole warps.
#ifndef WEFT_KERNELS_CUDA_DEVICE_CUH_
#define WEFT_KERNELS_CUDA_DEVICE_CUH_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kMaxWarps = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;
// The lowest finite float. A running maximum starts from it and not from -inf,
// because -inf minus -inf is NaN.
inline constexpr float kLowest = -3.402823466e+38F;

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void Store(float x, float* to) { *to = x; }
__device__ inline void Store(float x, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(x);
}

__device__ inline int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int WarpIndex() {
  return static_cast<int>(threadIdx.x) / kWarp;
}
__device__ inline int NumWarps() {
  return static_cast<int>(blockDim.x) / kWarp;
}

struct Add {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
// Returns the larger number and ignores NaN. A kernel that must not lose a NaN
// also sums the same values, because a sum keeps the NaN.
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Returns all lanes' values combined, with the same bits in every lane. All
// lanes of the warp call it.
template <typename T, typename Combine>
__device__ T WarpReduce(T value, Combine combine) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// Returns the values of all threads of the block combined, with the same bits
// in every thread. All threads call it. The call is also a barrier: afterwards
// all threads see earlier writes to shared memory.
template <typename T, typename Combine>
__device__ T BlockReduce(T value, Combine combine) {
  __shared__ T partial[kMaxWarps];
  value = WarpReduce(value, combine);
  if (Lane() == 0) partial[WarpIndex()] = value;
  __syncthreads();
  value = partial[0];
  for (int warp = 1; warp < NumWarps(); ++warp) {
    value = combine(value, partial[warp]);
  }
  // All threads wait here, because the next call overwrites `partial`, which
  // other threads may still read.
  __syncthreads();
  return value;
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_DEVICE_CUH_
