// The language of CUDA's kernels on the host; see cuda_runtime_api.h.
#ifndef WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_RUNTIME_H_
#define WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_RUNTIME_H_

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
// One block runs at a time, so that its memory may be everybody's.
#define __shared__ static
#define __launch_bounds__(threads)

struct dim3 {
  // Implicit, as CUDA's is.
  dim3(unsigned of_x = 1, unsigned of_y = 1, unsigned of_z = 1)
      : x(of_x), y(of_y), z(of_z) {}

  unsigned x;
  unsigned y;
  unsigned z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
// Of the thread that runs.
extern dim3 gridDim;
extern dim3 blockIdx;
extern dim3 blockDim;
extern dim3 threadIdx;

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

void __syncthreads();
void __syncwarp();

namespace weft::testing::cuda_on_host {

// Runs `thread` once for every thread of every block.
cudaError_t RunGrid(const cudaLaunchConfig_t& config,
                    const std::function<void()>& thread);

// 16 bytes per lane, through which the lanes of a warp pass values. `which`
// alternates: one barrier then parts two exchanges.
void* LaneSlot(unsigned lane, unsigned which);
// 0 and 1 in turn, for each thread by itself.
unsigned NextSlot();

}  // namespace weft::testing::cuda_on_host

namespace weft::testing::cuda_on_host {

// What lane `from` of the warp passes; all lanes pass something.
template <typename T>
T Exchange(T value, unsigned from) {
  static_assert(sizeof(T) <= 16);
  const unsigned which = NextSlot();
  std::memcpy(LaneSlot(threadIdx.x % 32, which), &value, sizeof(T));
  __syncwarp();
  std::memcpy(&value, LaneSlot(from, which), sizeof(T));
  return value;
}

}  // namespace weft::testing::cuda_on_host

template <typename T>
T __shfl_xor_sync(unsigned /*mask*/, T value, int lane_mask) {
  const unsigned lane = threadIdx.x % 32;
  return weft::testing::cuda_on_host::Exchange(
      value, lane ^ static_cast<unsigned>(lane_mask));
}
// The lanes below `delta` keep their own.
template <typename T>
T __shfl_up_sync(unsigned /*mask*/, T value, unsigned delta) {
  const unsigned lane = threadIdx.x % 32;
  return weft::testing::cuda_on_host::Exchange(
      value, lane >= delta ? lane - delta : lane);
}
template <typename T>
T __shfl_sync(unsigned /*mask*/, T value, int lane) {
  return weft::testing::cuda_on_host::Exchange(value,
                                               static_cast<unsigned>(lane));
}

// Threads run one at a time: plain memory will do.
template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address += value;
  return before;
}
inline void __threadfence() {}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  namespace host = weft::testing::cuda_on_host;
  if (host::observer.launches != nullptr) {
    host::observer.launches(reinterpret_cast<const void*>(kernel));
  }
  return host::RunGrid(*config, [&] { kernel(arguments...); });
}

#endif  // WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_RUNTIME_H_
