// Tensors of the device of host_device.h as tensors of the host.
#ifndef WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_TENSOR_H_
#define WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_TENSOR_H_

#include <ATen/ATen.h>

namespace weft::testing {

// The same memory as a tensor of the host. Returns undefined tensors and those
// of the host as they are.
[[nodiscard]] inline at::Tensor HostOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_TENSOR_H_
