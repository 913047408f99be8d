#include "src/ops/host_copy.h"

#include <ATen/ATen.h>

#include "src/ops/cuda_dispatch.h"

namespace weft::ops {

at::Tensor ToDevice(const at::Tensor& host, at::Device device) {
  if (host.device() == device) return host;
  // LibTorch uses pinned memory again only when the stream has read it.
  const at::Tensor source = device.is_cuda() ? host.pin_memory() : host;
  return source.to(device, /*non_blocking=*/true);
}

void ToHost(std::initializer_list<at::Tensor*> tensors) {
  if constexpr (kHasCudaKernels) {
    bool waits = false;
    for (at::Tensor* tensor : tensors) {
      if (!tensor->defined() || !tensor->is_cuda()) continue;
      const at::Tensor host =
          at::empty(tensor->sizes(),
                    tensor->options().device(at::kCPU).pinned_memory(true));
      host.copy_(*tensor, /*non_blocking=*/true);
      *tensor = host;
      waits = true;
    }
    if (waits) cuda::WaitForStream();
  }
}

}  // namespace weft::ops
