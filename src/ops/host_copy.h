// Copies between the host and the device within a step. A copy of ordinary host
// memory waits for all queued work of the stream, and then the device idles
// until the host queues the next kernel. So only ToHost waits here.
#ifndef WEFT_SRC_OPS_HOST_COPY_H_
#define WEFT_SRC_OPS_HOST_COPY_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <initializer_list>
#include <span>
#include <vector>

namespace weft::ops {

// Copies a host tensor to the device through pinned memory, without a wait.
// Returns a tensor that is already there as it is.
// Errors:  throws c10::Error.   Threads: engine thread only.
[[nodiscard]] at::Tensor ToDevice(const at::Tensor& host, at::Device device);

// The same for bytes [N].
[[nodiscard]] at::Tensor ToDevice(std::span<const std::byte> bytes,
                                  at::Device device);

// The same for [N] numbers, in the dtype of T or in another one.
template <typename T>
[[nodiscard]] at::Tensor ToDevice(
    const std::vector<T>& values, at::Device device,
    at::ScalarType dtype = c10::CppTypeToScalarType<T>::value) {
  return ToDevice(at::tensor(c10::ArrayRef<T>(values), dtype), device);
}

// Replaces these tensors by contiguous copies on the host. Host tensors and
// undefined ones stay as they are. Waits for the stream once if there is
// something to copy. This is the only wait of a pass.
// Errors:  throws c10::Error, also that of an operation queued before.
// Threads: engine thread only.
void ToHost(std::initializer_list<at::Tensor*> tensors);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_HOST_COPY_H_
