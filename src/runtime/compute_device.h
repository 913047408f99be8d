// The device that a rank computes on, as far as its memory and its health go.
// What it computes goes through LibTorch.
#ifndef WEFT_SRC_RUNTIME_COMPUTE_DEVICE_H_
#define WEFT_SRC_RUNTIME_COMPUTE_DEVICE_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"

namespace weft::engine {

// Bytes. Memory that LibTorch's allocator has reserved and not handed out it
// keeps for later.
struct DeviceMemory {
  int64_t total = 0;
  int64_t reserved = 0;
  int64_t allocated = 0;
};

// Threads: one at a time. Throws c10::Error unless it says otherwise.
class ComputeDevice {
 public:
  virtual ~ComputeDevice() = default;

  // All 0 where the memory is the host's. Asks nobody but the allocator.
  [[nodiscard]] virtual DeviceMemory Memory() const = 0;
  // Lets this process take `share` of all the device's memory from now on and
  // says how much of that it can still have. Not for the host's memory.
  [[nodiscard]] virtual int64_t LimitTo(double share) = 0;

  // Until it has done all that is queued, so that the time of work is its own
  // and an error is met by the work that made it.
  virtual void Wait() = 0;

  // After work that ran out of memory: gives back what nobody uses. After any
  // failed work: UNAVAILABLE, with the device's word for it, when it computes
  // nothing any more for this process. Neither throws.
  virtual void ReleaseCached() = 0;
  [[nodiscard]] virtual absl::Status CheckAnswers() = 0;
};

[[nodiscard]] std::unique_ptr<ComputeDevice> MakeComputeDevice(
    c10::Device device);

// The same for a CUDA device; in a build with CUDA only.
[[nodiscard]] std::unique_ptr<ComputeDevice> MakeCudaDevice(c10::Device device);

}  // namespace weft::engine

#endif  // WEFT_SRC_RUNTIME_COMPUTE_DEVICE_H_
