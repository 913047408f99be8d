#include "tests/support/host_device/host_device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include "tests/support/host_device/function_name.h"

namespace weft::testing {
namespace {

DeviceEvents* current = nullptr;
int64_t num_live_allocations = 0;

// Memory has the alignment of device memory.
void* Allocate(size_t num_bytes) {
  constexpr size_t kAlignment = 256;
  void* data = std::aligned_alloc(
      kAlignment, (num_bytes + kAlignment - 1) / kAlignment * kAlignment);
  // The bytes are NaN in every dtype, so that tests detect reads before writes.
  std::memset(data, 0xFF, num_bytes);
  return data;
}

void FreeOnDevice(void* data) {
  cuda_on_host::MakeQueuedCopies();
  AddLiveAllocations(-1);
  std::free(data);
}

class DeviceAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(c10::kCUDA, 0);
    if (num_bytes == 0) return {nullptr, device};
    AddLiveAllocations(1);
    void* data = Allocate(num_bytes);
    return {data, data, &FreeOnDevice, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &FreeOnDevice; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

std::set<const void*>& PinnedBlocks() {
  static std::set<const void*> blocks;
  return blocks;
}

void FreePinned(void* data) {
  PinnedBlocks().erase(data);
  std::free(data);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t num_bytes) override {
    void* data = Allocate(num_bytes);
    PinnedBlocks().insert(data);
    return {data, data, &FreePinned, c10::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &FreePinned; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

// The hooks that LibTorch calls for CUDA. There is no generator, because
// getNumGPUs() is 0.
class HostCudaHooks final : public at::CUDAHooksInterface {
 public:
  explicit HostCudaHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override {
    return PinnedBlocks().contains(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
};

DeviceAllocator device_allocator;
[[maybe_unused]] const bool has_allocator = [] {
  c10::SetAllocator(c10::kCUDA, &device_allocator);
  return true;
}();

using HostGuard = c10::impl::FakeGuardImpl<c10::kCUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, HostGuard)

void NoteLaunch(const void* kernel) {
  CurrentEvents().launches.push_back(FunctionName(kernel));
}
void NoteWait(const char* call) { CurrentEvents().waits.emplace_back(call); }

}  // namespace

int64_t NumLiveAllocations() { return num_live_allocations; }
void AddLiveAllocations(int64_t count) { num_live_allocations += count; }

DeviceEvents& CurrentEvents() {
  static DeviceEvents nobodys;
  return current == nullptr ? nobodys : *current;
}

DeviceRecording::DeviceRecording() {
  current = &events_;
  cuda_on_host::observer = {.launches = &NoteLaunch, .waits = &NoteWait};
}

DeviceRecording::~DeviceRecording() {
  current = nullptr;
  cuda_on_host::observer = {};
}

}  // namespace weft::testing

namespace at {
using HostCudaHooks = weft::testing::HostCudaHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, HostCudaHooks)
}  // namespace at
