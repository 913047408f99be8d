// Replaces LibTorch's header; see ../../host_device.h.
#ifndef WEFT_TESTS_SUPPORT_HOST_DEVICE_C10_CUDA_CUDAEXCEPTION_H_
#define WEFT_TESTS_SUPPORT_HOST_DEVICE_C10_CUDA_CUDAEXCEPTION_H_

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#define C10_CUDA_CHECK(call)                                      \
  do {                                                            \
    const cudaError_t error = (call);                             \
    TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error)); \
  } while (false)

#endif  // WEFT_TESTS_SUPPORT_HOST_DEVICE_C10_CUDA_CUDAEXCEPTION_H_
