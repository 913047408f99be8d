// Copies large tensors between the device and ordinary host memory.
//
// CUDA itself copies ordinary memory with one thread, and that thread takes all
// page faults of new memory. BulkCopy copies pieces through two pinned buffers
// in turn. While the device copies a piece to or from one buffer, all threads
// of LibTorch copy another piece between the other buffer and ordinary memory.
//
// The first copy allocates the buffers, 2 * kBulkPieceBytes of pinned memory.
// The process keeps them until it ends, and needs no more for larger tensors.
#ifndef WEFT_SRC_OPS_BULK_COPY_H_
#define WEFT_SRC_OPS_BULK_COPY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace weft::ops {

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
[[nodiscard]] at::Tensor BulkCopyTo(const at::Tensor& tensor,
                                    at::Device device);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_BULK_COPY_H_
