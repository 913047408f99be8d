#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>

#include "absl/strings/str_cat.h"
#include "src/base/observe/log.h"
#include "src/engine/device/compute_device.h"
#include "src/engine/device/device_error.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::engine {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

class CudaDevice final : public ComputeDevice {
 public:
  explicit CudaDevice(c10::Device device)
      : device_(MadeCurrent(device)),
        total_(static_cast<int64_t>(
            allocator::get()->getMemoryInfo(device.index()).second)) {}

  DeviceMemory Memory() const override {
    constexpr auto kAll =
        static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const c10::CachingDeviceAllocator::DeviceStats stats =
        allocator::getDeviceStats(device_.index());
    return {.total = total_,
            .reserved = stats.reserved_bytes[kAll].current,
            .allocated = stats.allocated_bytes[kAll].current};
  }

  int64_t LimitTo(double share) override {
    allocator::setMemoryFraction(share, device_.index());
    allocator::emptyCache();
    const auto limit =
        static_cast<int64_t>(share * static_cast<double>(total_));
    const auto free = static_cast<int64_t>(
        allocator::get()->getMemoryInfo(device_.index()).first);
    const DeviceMemory memory = Memory();
    return std::max<int64_t>(0, std::min(free, limit - memory.reserved)) +
           memory.reserved - memory.allocated;
  }

  void Wait() override { ops::cuda::WaitForStream(); }

  void ReleaseCached() override {
    try {
      allocator::emptyCache();
    } catch (const std::exception& error) {
      // CheckAnswers decides later whether the device is lost.
      Log(LogLevel::kError, "cached memory could not be given back",
          {{"error", error.what()}});
    }
  }

  absl::Status CheckAnswers() override {
    // Calls the CUDA runtime directly, because LibTorch's guards throw if the
    // device is lost.
    static_cast<void>(cudaSetDevice(device_.index()));
    const cudaError_t waiting = cudaDeviceSynchronize();
    // Clears the error, so that a temporary error is not reported again.
    static_cast<void>(cudaGetLastError());
    const cudaError_t again = cudaDeviceSynchronize();
    static_cast<void>(cudaGetLastError());
    if (!IsLost({.waiting = waiting, .again = again})) return absl::OkStatus();
    const cudaError_t error = again == cudaSuccess ? waiting : again;
    return absl::UnavailableError(absl::StrCat(
        "CUDA device ", static_cast<int>(device_.index()), ": ",
        cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
  }

 private:
  // Lets LibTorch set up CUDA, which creates LibTorch's allocator. Then makes
  // the device current.
  static c10::Device MadeCurrent(c10::Device device) {
    at::globalContext().lazyInitDevice(at::kCUDA);
    c10::cuda::set_device(device.index());
    return device;
  }

  const c10::Device device_;
  const int64_t total_;
};

}  // namespace

std::unique_ptr<ComputeDevice> MakeCudaDevice(c10::Device device) {
  return std::make_unique<CudaDevice>(device);
}

}  // namespace weft::engine
