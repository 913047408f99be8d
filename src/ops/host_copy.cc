#include "src/ops/host_copy.h"

#include <ATen/ATen.h>

#include <cstring>
#include <utility>
#include <vector>

#include "src/ops/cuda_dispatch.h"

namespace weft::ops {

at::Tensor ToDevice(const at::Tensor& host, at::Device device) {
  if (host.device() == device) return host;
  // `source` may be freed before the copy is done, because LibTorch reuses
  // pinned memory only after the stream has read it.
  const at::Tensor source = device.is_cuda() ? host.pin_memory() : host;
  return source.to(device, /*non_blocking=*/true);
}

at::Tensor ToDevice(std::span<const std::byte> bytes, at::Device device) {
  const at::Tensor host =
      at::empty({static_cast<int64_t>(bytes.size())},
                at::TensorOptions(at::kByte).pinned_memory(device.is_cuda()));
  std::memcpy(host.mutable_data_ptr(), bytes.data(), bytes.size());
  return host.to(device, /*non_blocking=*/true);
}

void ToHost(std::initializer_list<at::Tensor*> tensors) {
  if constexpr (kHasCudaKernels) {
    // Pairs of source and target.
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
    for (at::Tensor* tensor : tensors) {
      if (!tensor->defined() || !tensor->is_cuda()) continue;
      copies.emplace_back(
          tensor->contiguous(),
          at::empty(tensor->sizes(),
                    tensor->options().device(at::kCPU).pinned_memory(true)));
      *tensor = copies.back().second;
    }
    if (!copies.empty()) cuda::CopyToHost(copies);
  }
}

}  // namespace weft::ops
