// The language of CUDA kernels on the host; see cuda_runtime_api.h.
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
// One block runs at a time, so shared memory may be static.
#define __shared__ static
// A kernel begins with a NOP for each warp of its bound, where a launch reads
// the bound. Clang cannot do this in templates, so its kernels have no bounds.
#ifdef __clang__
#define __launch_bounds__(...)
#else
#define __launch_bounds__(threads, ...) \
  __attribute__((patchable_function_entry((threads) / 32)))
#endif

struct dim3 {
  // Implicit, like CUDA's dim3.
  dim3(unsigned of_x = 1, unsigned of_y = 1, unsigned of_z = 1)
      : x(of_x), y(of_y), z(of_z) {}

  unsigned x;
  unsigned y;
  unsigned z;
};
// Kernels copy elements of every type as these, so they may alias every type.
struct alignas(16) [[gnu::may_alias]] uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) [[gnu::may_alias]] uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
// The running thread's position, and the sizes of its grid and block.
extern dim3 gridDim;
extern dim3 blockIdx;
extern dim3 blockDim;
extern dim3 threadIdx;

// On a device, a launch with this attribute may start before the previous
// launch ends. Here, launches run one after another. But the process ends if a
// thread of the launch never calls cudaGridDependencySynchronize.
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

void cudaGridDependencySynchronize();
void __syncthreads();
void __syncwarp();

namespace weft::testing::cuda_on_host {

// Runs `thread`, a call of `kernel`, once for every thread of every block.
cudaError_t RunGrid(const cudaLaunchConfig_t& config, const void* kernel,
                    const std::function<void()>& thread);
// Lets launches of the kernel have more dynamic shared memory than 48 KiB.
cudaError_t RaiseDynamicShared(const void* kernel, int num_bytes);

constexpr unsigned kSlotBytes = 32;
// Returns the kSlotBytes in which a lane of the running warp passes values. The
// slots of a warp's lanes lie one after another.
// `which` alternates, so that one barrier for each exchange is enough.
void* LaneSlot(unsigned lane, unsigned which);
// Returns 0 and 1 alternately, separately for each thread.
unsigned NextSlot();

// Returns the value that lane `other` passes. All lanes make this call.
template <typename T>
T ReadLane(T value, unsigned other) {
  static_assert(sizeof(T) <= 16);
  const unsigned which = NextSlot();
  std::memcpy(LaneSlot(threadIdx.x % 32, which), &value, sizeof(T));
  __syncwarp();
  std::memcpy(&value, LaneSlot(other % 32, which), sizeof(T));
  return value;
}

}  // namespace weft::testing::cuda_on_host

template <typename T>
T __shfl_xor_sync(unsigned /*mask*/, T value, int lane_mask) {
  return weft::testing::cuda_on_host::ReadLane(
      value, threadIdx.x ^ static_cast<unsigned>(lane_mask));
}
// The lanes below `delta` keep their own value.
template <typename T>
T __shfl_up_sync(unsigned /*mask*/, T value, unsigned delta) {
  const unsigned lane = threadIdx.x % 32;
  return weft::testing::cuda_on_host::ReadLane(
      value, lane >= delta ? lane - delta : lane);
}
template <typename T>
T __shfl_sync(unsigned /*mask*/, T value, int from) {
  return weft::testing::cuda_on_host::ReadLane(value,
                                               static_cast<unsigned>(from));
}

// Returns a mask of the lanes whose value is true. All lanes make this call.
inline unsigned __ballot_sync(unsigned mask, bool value) {
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    lanes |= static_cast<unsigned>(__shfl_sync(mask, value, lane)) << lane;
  }
  return lanes;
}
inline int __popc(unsigned x) { return std::popcount(x); }

// Threads run one at a time, and blocks one after another, so atomics are plain
// accesses.
template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address += value;
  return before;
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  const unsigned before = *address;
  *address = before >= last ? 0 : before + 1;
  return before;
}
inline void __threadfence() {}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}

// Numbers the bytes of both words from the lowest byte of `low`, and returns
// four of these bytes. Each hexadecimal digit of `which` selects one byte.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
  const auto all = static_cast<unsigned long long>(high) << 32 | low;
  unsigned word = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned byte = which >> 4 * i & 7;
    word |= static_cast<unsigned>(all >> 8 * byte & 0xFF) << 8 * i;
  }
  return word;
}
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
// On a device, this store has the same cache policy as an assignment.
template <typename T>
void __stwb(T* to, T value) {
  *to = value;
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __fmul_rn(float x, float y) { return x * y; }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...),
                                 cudaFuncAttribute /*attribute*/, int value) {
  return weft::testing::cuda_on_host::RaiseDynamicShared(
      reinterpret_cast<const void*>(kernel), value);
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  namespace host = weft::testing::cuda_on_host;
  const auto* const address = reinterpret_cast<const void*>(kernel);
  if (host::observer.launches != nullptr) host::observer.launches(address);
  return host::RunGrid(*config, address, [&] { kernel(arguments...); });
}

#endif  // WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_RUNTIME_H_
