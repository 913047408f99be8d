// Gives the memory and the health of the device on which a rank computes.
// LibTorch does the computing.
#ifndef WEFT_SRC_ENGINE_DEVICE_COMPUTE_DEVICE_H_
#define WEFT_SRC_ENGINE_DEVICE_COMPUTE_DEVICE_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"

namespace weft::engine {

// Sizes in bytes. LibTorch's allocator holds `reserved` bytes. Tensors use
// `allocated` of these bytes; the rest is cached.
struct DeviceMemory {
  int64_t total = 0;
  int64_t reserved = 0;
  int64_t allocated = 0;
};

// Threads: not thread-safe. Methods throw c10::Error unless they say otherwise.
class ComputeDevice {
 public:
  virtual ~ComputeDevice() = default;

  // Returns the device's memory; 0 for each field if the device is the host.
  // Asks only LibTorch's allocator, so it does not wait for the device.
  virtual DeviceMemory Memory() const = 0;
  // Limits this process to `share` of the device's memory from now on. Returns
  // how many bytes are left for tensors within the share. REQUIRES: the device
  // is not the host.
  virtual int64_t LimitTo(double share) = 0;

  // Waits until the device has done the work of the current stream, so that
  // time and errors are attributed to the work that caused them.
  virtual void Wait() = 0;

  // Frees cached memory. Call it after work ran out of memory. Does not throw.
  virtual void ReleaseCached() = 0;
  // Frees cached memory if the device is the host. Call it after a while
  // without work. Does not throw.
  virtual void ReleaseIdle() {}
  // Waits for the device. Returns UNAVAILABLE, with the device's message, if
  // the device no longer computes for this process. Call it after failed work.
  // Does not throw.
  virtual absl::Status CheckAnswers() = 0;
};

std::unique_ptr<ComputeDevice> MakeComputeDevice(c10::Device device);

// Makes a CUDA device. Only a build with CUDA defines this function.
std::unique_ptr<ComputeDevice> MakeCudaDevice(c10::Device device);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DEVICE_COMPUTE_DEVICE_H_
