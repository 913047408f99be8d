// The device of decode graphs (src/executor/decode_graph.h). A graph keeps the
// step's function, and a replay calls it and counts as one launch.
#include <ATen/ATen.h>

#include <memory>
#include <utility>

#include "src/executor/decode_graph.h"
#include "src/ops/cuda_dispatch.h"
#include "tests/support/host_device/host_device.h"

namespace weft::executor {
namespace {

class HostStepGraph final : public StepGraph {
 public:
  explicit HostStepGraph(StepFunction step) : step_(std::move(step)) {}
  at::Tensor Replay() override {
    testing::DeviceEvents& events = testing::CurrentEvents();
    testing::DeviceEvents before = events;
    at::Tensor result = step_();
    events = std::move(before);
    events.launches.emplace_back("graph");
    return result;
  }

 private:
  const StepFunction step_;
};

class HostStepDevice final : public StepDevice {
 public:
  void Run(const StepFunction& step) override {
    step();
    ops::cuda::WaitForStream();
  }
  std::unique_ptr<StepGraph> Record(const StepFunction& step) override {
    return std::make_unique<HostStepGraph>(step);
  }
  int64_t FreeBytes() override { return 0; }
  at::Tensor HostBuffer(int64_t bytes) override {
    return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  }
  void Upload(const at::Tensor& host, int64_t bytes,
              const at::Tensor& device) override {
    ops::cuda::QueueUpload(host.const_data_ptr(), bytes,
                           device.mutable_data_ptr());
    testing::CurrentEvents().uploads.emplace_back("inputs of a step");
  }
};

}  // namespace

std::unique_ptr<StepDevice> MakeCudaStepDevice(at::Device /*device*/) {
  return std::make_unique<HostStepDevice>();
}

}  // namespace weft::executor
