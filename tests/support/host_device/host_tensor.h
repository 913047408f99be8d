// Views of tensors of host_device.h's device as tensors of the host.
#ifndef WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_TENSOR_H_
#define WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_TENSOR_H_

#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

namespace weft::testing {

// Returns the same memory as a host tensor, after the copies that were queued
// before. Returns undefined tensors and host tensors unchanged.
[[nodiscard]] inline at::Tensor HostOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  cuda_on_host::MakeQueuedCopies();
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_TENSOR_H_
