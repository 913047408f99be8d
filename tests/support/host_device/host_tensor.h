// Makes host tensors that share memory with tensors on host_device.h's device.
#ifndef WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_TENSOR_H_
#define WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_TENSOR_H_

#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

namespace weft::testing {

// Makes all queued copies, and then returns a host tensor that shares memory
// with `tensor`. Returns undefined tensors and host tensors unchanged.
inline at::Tensor HostOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  cuda_on_host::MakeQueuedCopies();
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_TENSOR_H_
