// Starts kernels. Blocks are one-dimensional.
#ifndef WEFT_KERNELS_CUDA_LAUNCH_CUH_
#define WEFT_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace weft::kernels::cuda {

// The largest grid of a launch: kMaxGrid blocks in x, and kMaxGridYz blocks in
// each of y and z.
inline constexpr int64_t kMaxGrid = 2147483647;
inline constexpr int64_t kMaxGridYz = 65535;

// Waits until the earlier launches of the stream have ended and their writes
// can be read. In a kernel that LaunchEarly starts, every thread calls it
// before the kernel writes anything, even a thread without work. Before the
// call, a kernel reads only tables and weights, which were complete before the
// last ordinary launch of the stream began.
__device__ inline void WaitForEarlierLaunches() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Returns whether the current device can start a kernel before earlier launches
// have ended. This also requires code that was compiled for compute capability
// 9.0 or later, because older code does not wait for these launches.
inline bool StartsEarly() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                             device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor,
                             device) != cudaSuccess) {
    return false;
  }
  const int own = 100 * major + 10 * minor;
#ifdef __CUDA_ARCH_LIST__
  for (const int compiled : {__CUDA_ARCH_LIST__}) {
    if (compiled >= 900 && compiled <= own) return true;
  }
  return false;
#else
  return own >= 900;
#endif
}

struct LaunchShape {
  int64_t grid_x = 1;
  int64_t grid_y = 1;
  unsigned threads = 0;
  size_t shared_bytes = 0;    // Dynamic shared memory per block.
  bool starts_early = false;  // See LaunchEarly.
};

// Starts the kernel, and does not wait. Raises the kernel's limit of dynamic
// shared memory if needed, because the default may be lower. If the grid is too
// large for a device, returns cudaErrorInvalidConfiguration and starts nothing.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchShaped(void (*kernel)(Parameters...),
                         const LaunchShape& shape, cudaStream_t stream,
                         Arguments... arguments) {
  if (shape.grid_x > kMaxGrid || shape.grid_y > kMaxGridYz) {
    return cudaErrorInvalidConfiguration;
  }
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid_x),
                        static_cast<unsigned>(shape.grid_y), 1);
  config.blockDim = dim3(shape.threads, 1, 1);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = shape.starts_early && StartsEarly() ? 1 : 0;
  cudaError_t status = cudaSuccess;
  if (shape.shared_bytes > 0) {
    status = cudaFuncSetAttribute(kernel,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shape.shared_bytes));
  }
  if (status == cudaSuccess) {
    status = cudaLaunchKernelEx(&config, kernel,
                                static_cast<Parameters>(arguments)...);
  }
  // Clears the runtime's last error. Otherwise the next launch would report it.
  const cudaError_t last = cudaGetLastError();
  return status == cudaSuccess ? last : status;
}

// Starts a kernel without dynamic shared memory, like LaunchShaped.
template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), int64_t grid_x,
                   int64_t grid_y, unsigned threads, cudaStream_t stream,
                   Arguments... arguments) {
  return LaunchShaped(kernel,
                      {.grid_x = grid_x, .grid_y = grid_y, .threads = threads},
                      stream, arguments...);
}

// Starts a kernel like Launch. If StartsEarly(), the kernel may begin before
// earlier launches of the stream have ended, so that its startup overlaps with
// their end. The kernel must call WaitForEarlierLaunches.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchEarly(void (*kernel)(Parameters...), int64_t grid_x,
                        int64_t grid_y, unsigned threads, cudaStream_t stream,
                        Arguments... arguments) {
  return LaunchShaped(kernel,
                      {.grid_x = grid_x,
                       .grid_y = grid_y,
                       .threads = threads,
                       .starts_early = true},
                      stream, arguments...);
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LAUNCH_CUH_
