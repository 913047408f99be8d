#include "src/engine/device/compute_device.h"

#include "src/engine/device/host_allocator.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::engine {
namespace {

// The host as a compute device. It needs no health check: a host that fails
// ends the process.
class HostDevice final : public ComputeDevice {
 public:
  DeviceMemory Memory() const override { return {}; }
  int64_t LimitTo(double /*share*/) override { return 0; }
  void Wait() override {}
  void ReleaseCached() override { HostAllocator::Get().ReleaseCached(); }
  void ReleaseIdle() override { HostAllocator::Get().ReleaseCached(); }
  absl::Status CheckAnswers() override { return absl::OkStatus(); }
};

}  // namespace

std::unique_ptr<ComputeDevice> MakeComputeDevice(c10::Device device) {
  if constexpr (ops::kHasCudaKernels) {
    if (device.is_cuda()) return MakeCudaDevice(device);
  }
  return std::make_unique<HostDevice>();
}

}  // namespace weft::engine
