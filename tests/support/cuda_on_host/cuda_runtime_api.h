// The part of CUDA's runtime that the CUDA kernels and their tests use, on the
// host. kernels/cuda/*.cu compile with this folder as plain C++, so their tests
// need neither a GPU nor nvcc.
//
// A block's threads are fibers of one thread. They run one after another from
// barrier to barrier. Each warp runs as far as it can before the next warp. The
// order alternates between forward and backward. If a barrier is missing, one
// of the two orders gives a wrong result. All threads of a block must reach a
// barrier, and all lanes of a warp must reach a warp operation. Otherwise the
// process ends with a message. "Device" memory is the heap, so the address
// sanitizer sees every access. The kernels are compiled so that an access to an
// address that is no multiple of its size also ends the process with a message.
//
// A launch fails if it has more threads than __launch_bounds__, or more dynamic
// shared memory than the device (max_shared_bytes) or the kernel's attribute
// allows. Static shared memory is not added, because a launch does not know it.
// tests/kernels/cuda/test_device_code.py adds it.
//
// Tests here do not measure speed, and do not find behaviour that is undefined
// only on a device.
#ifndef WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_RUNTIME_API_H_
#define WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_RUNTIME_API_H_

#include <cstddef>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchOutOfResources = 701
};
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
using cudaStream_t = struct CUstream_st*;

// There is one device. A launch has finished when it returns. An asynchronous
// copy happens at the next launch or wait. Until then, a copy to the host
// leaves 0xFF in all bytes of its destination. So tests detect host memory that
// is read or written too early.
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                   int device);
cudaError_t cudaMalloc(void** data, size_t num_bytes);
cudaError_t cudaFree(void* data);
cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes,
                       cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes,
                            cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);

namespace weft::testing::cuda_on_host {

// Functions that may be null. `launches` is called for each launch, with the
// kernel's address. `waits` is called for each call that waits for a stream,
// with the name of that call.
struct Observer {
  void (*launches)(const void* kernel) = nullptr;
  void (*waits)(const char* call) = nullptr;
};
inline Observer observer;

// Makes the asynchronous copies that have not happened yet.
void MakeQueuedCopies();

// The value of cudaDevAttrComputeCapabilityMajor.
inline int compute_capability_major = 9;

// The value of cudaDevAttrMaxSharedMemoryPerBlockOptin: that of compute
// capability 9. It is 163 KiB in 8.0, and 99 KiB in 8.6, 8.9 and 12.0.
inline constexpr int kSharedBytesOfHopper = 227 * 1024;
inline int max_shared_bytes = kSharedBytesOfHopper;

}  // namespace weft::testing::cuda_on_host

#endif  // WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_RUNTIME_API_H_
