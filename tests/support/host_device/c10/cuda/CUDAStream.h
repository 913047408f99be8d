// Replaces LibTorch's header; see ../../host_device.h.
#ifndef WEFT_TESTS_SUPPORT_HOST_DEVICE_C10_CUDA_CUDASTREAM_H_
#define WEFT_TESTS_SUPPORT_HOST_DEVICE_C10_CUDA_CUDASTREAM_H_

#include <cuda_runtime_api.h>

namespace c10::cuda {

class CUDAStream {
 public:
  cudaStream_t stream() const { return nullptr; }
};

inline CUDAStream getCurrentCUDAStream() { return {}; }

}  // namespace c10::cuda

#endif  // WEFT_TESTS_SUPPORT_HOST_DEVICE_C10_CUDA_CUDASTREAM_H_
