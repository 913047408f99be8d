// Copies between the host and the device. A copy of ordinary host memory waits
// for all queued work of the stream. The device then idles until the host
// queues the next kernel. So ToDevice copies through pinned memory without
// waiting, and only ToHost waits. Both allocate pinned memory of the tensor's
// size. BulkCopy needs two pinned buffers of a fixed size.
#ifndef WEFT_SRC_OPS_HOST_COPY_H_
#define WEFT_SRC_OPS_HOST_COPY_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

namespace weft::ops {

// Copies a host tensor to the device through pinned memory, without a wait. If
// the tensor is already on the device, returns the tensor itself.
// Errors:  throws c10::Error.   Threads: engine thread only.
at::Tensor ToDevice(const at::Tensor& host, at::Device device);

// Copies N bytes to a tensor [N] of bytes on the device, also without a wait.
at::Tensor ToDevice(std::span<const std::byte> bytes, at::Device device);

// Copies N numbers to a tensor [N] of `dtype` on the device, also without a
// wait.
template <typename T>
at::Tensor ToDevice(const std::vector<T>& values, at::Device device,
                    at::ScalarType dtype = c10::CppTypeToScalarType<T>::value) {
  return ToDevice(at::tensor(c10::ArrayRef<T>(values), dtype), device);
}

// Replaces these tensors by contiguous copies on the host. Leaves host tensors
// and undefined tensors unchanged. If any tensor is on the device, waits once
// for the stream.
// Errors:  throws c10::Error, also if work that was queued before has failed.
// Threads: engine thread only.
void ToHost(std::initializer_list<at::Tensor*> tensors);

// For large tensors, CUDA itself copies ordinary memory with one thread, and
// that thread takes all page faults of new memory. BulkCopy copies pieces
// through two pinned buffers in turn. While the device copies a piece to or
// from one buffer, all threads of LibTorch copy another piece between the other
// buffer and ordinary memory.
//
// The first copy allocates the buffers, 2 * kBulkPieceBytes of pinned memory.
// The process keeps them until it ends, and needs no more for larger tensors.
inline constexpr int64_t kBulkPieceBytes = int64_t{16} << 20;

// Copies `from` to `to`. Both are contiguous and have equal sizes and dtypes.
// If one of them is on the device and the other one is not, waits for the copy,
// and so for all work that the stream had before.
// Errors:  throws c10::Error, also if work that was queued before has failed.
// Threads: engine thread only.
void BulkCopy(const at::Tensor& from, const at::Tensor& to);

// Returns a copy on `device`, which is the host or the one device of the
// process. If the tensor is already on `device`, returns the tensor itself. A
// copy on the host is in huge pages if the operating system has them.
// Errors:  those of BulkCopy; std::bad_alloc if there is no host memory.
// Threads: engine thread only.
at::Tensor BulkCopyTo(const at::Tensor& tensor, at::Device device);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_HOST_COPY_H_
