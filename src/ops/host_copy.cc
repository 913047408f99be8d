#include "src/ops/host_copy.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "src/base/huge_pages.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/thread_team.h"

namespace weft::ops {
namespace {

// The fewest bytes that are worth waking a thread.
constexpr int64_t kThreadBytes = int64_t{1} << 20;

// A part of the copied bytes, and the pinned buffer through which it goes.
struct CopyPiece {
  int64_t begin = 0;
  int64_t size = 0;
  std::byte* pinned = nullptr;
};

// Returns the two buffers, one behind the other. They are never freed, because
// LibTorch would keep the memory anyway.
std::byte* PinnedBuffers() {
  static const at::Tensor& buffers = *new at::Tensor(at::empty(
      {2 * kBulkPieceBytes}, at::TensorOptions(at::kByte).pinned_memory(true)));
  return static_cast<std::byte*>(buffers.mutable_data_ptr());
}

CopyPiece PieceAt(int64_t index, int64_t bytes) {
  const int64_t begin = index * kBulkPieceBytes;
  return {.begin = begin,
          .size = std::min(bytes - begin, kBulkPieceBytes),
          .pinned = PinnedBuffers() + index % 2 * kBulkPieceBytes};
}

void CopyOnHost(const std::byte* from, int64_t bytes, std::byte* to) {
  ParallelFor(bytes, kThreadBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, end - begin);
  });
}

// Copies from the device. REQUIRES: bytes > 0.
void Download(const std::byte* from, int64_t bytes, std::byte* to) {
  const int64_t num_pieces = CeilDiv(bytes, kBulkPieceBytes);
  const auto queue = [&](const CopyPiece& piece) {
    cuda::QueueDownload(from + piece.begin, piece.size, piece.pinned);
  };
  queue(PieceAt(0, bytes));
  for (int64_t i = 0; i < num_pieces; ++i) {
    cuda::WaitForStream();
    // The device copies the next piece while the threads copy this one.
    if (i + 1 < num_pieces) queue(PieceAt(i + 1, bytes));
    const CopyPiece piece = PieceAt(i, bytes);
    CopyOnHost(piece.pinned, piece.size, to + piece.begin);
  }
}

void Upload(const std::byte* from, int64_t bytes, std::byte* to) {
  for (int64_t i = 0; i < CeilDiv(bytes, kBulkPieceBytes); ++i) {
    const CopyPiece piece = PieceAt(i, bytes);
    CopyOnHost(from + piece.begin, piece.size, piece.pinned);
    // Waits for the previous piece, because the next one goes to its buffer.
    cuda::WaitForStream();
    cuda::QueueUpload(piece.pinned, piece.size, to + piece.begin);
  }
  cuda::WaitForStream();
}

at::Tensor EmptyOnHost(const at::Tensor& like) {
  at::Tensor tensor;
  try {
    tensor = at::empty(like.sizes(), like.options().device(at::kCPU));
  } catch (const c10::Error&) {
    // Without this conversion, RunGuarded (src/engine/device/compute_guard.h)
    // would take LibTorch's error for an internal error.
    throw std::bad_alloc();
  }
  PreferHugePages(absl::MakeSpan(
      static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()));
  return tensor;
}

}  // namespace

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

void BulkCopy(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(from.is_contiguous() && to.is_contiguous() &&
                  from.sizes() == to.sizes() && from.dtype() == to.dtype(),
              "a bulk copy wants two contiguous tensors of one kind, got ",
              from.toString(), " ", from.sizes(), " and ", to.toString(), " ",
              to.sizes());
  if constexpr (kHasCudaKernels) {
    if (from.is_cuda() != to.is_cuda()) {
      const auto bytes = static_cast<int64_t>(from.nbytes());
      if (bytes == 0) return;
      const auto* source = static_cast<const std::byte*>(from.const_data_ptr());
      auto* target = static_cast<std::byte*>(to.mutable_data_ptr());
      from.is_cuda() ? Download(source, bytes, target)
                     : Upload(source, bytes, target);
      return;
    }
  }
  to.copy_(from);
}

at::Tensor BulkCopyTo(const at::Tensor& tensor, at::Device device) {
  if (tensor.is_cpu() == device.is_cpu()) return tensor;
  const at::Tensor copy =
      device.is_cpu()
          ? EmptyOnHost(tensor)
          : at::empty(tensor.sizes(), tensor.options().device(device));
  BulkCopy(tensor, copy);
  return copy;
}

}  // namespace weft::ops
