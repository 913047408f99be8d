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
#define __launch_bounds__(...)

struct dim3 {
  // Implicit, as CUDA's is.
  dim3(unsigned of_x = 1, unsigned of_y = 1, unsigned of_z = 1)
      : x(of_x), y(of_y), z(of_z) {}

  unsigned x;
  unsigned y;
  unsigned z;
};
// Kernels move elements of every type as these.
struct alignas(16) [[gnu::may_alias]] uint4 {
  unsigned x, y, z, w;
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

template <typename T>
T __shfl_xor_sync(unsigned /*mask*/, T value, int lane_mask) {
  namespace host = weft::testing::cuda_on_host;
  static_assert(sizeof(T) <= 16);
  const unsigned lane = threadIdx.x % 32;
  const unsigned which = host::NextSlot();
  std::memcpy(host::LaneSlot(lane, which), &value, sizeof(T));
  __syncwarp();
  const unsigned other = lane ^ static_cast<unsigned>(lane_mask);
  std::memcpy(&value, host::LaneSlot(other, which), sizeof(T));
  return value;
}

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
// A store with the policy of an assignment.
inline void __stwb(uint4* to, uint4 value) { *to = value; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return weft::testing::cuda_on_host::RunGrid(*config,
                                              [&] { kernel(arguments...); });
}

#endif  // WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_RUNTIME_H_
