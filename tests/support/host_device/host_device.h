// A CUDA device of LibTorch on the host: linked into a test, it makes LibTorch
// without CUDA's libraries take tensors of at::kCUDA. Their memory is the
// heap's, their operators run as the CPU's do, at once. With kernels/cuda
// compiled for the host (../cuda_on_host), what a build with CUDA does with a
// device runs as a whole, and every launch is a call that can be counted.
//
// The headers of c10/cuda beside this one stand in for those that need CUDA's.
// An operator that mixes tensors of host and device is refused as on a device;
// new memory holds NaN. A kernel that is given an address of the host is not
// found out.
#ifndef WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_DEVICE_H_
#define WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_DEVICE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace weft::testing {

// What the device was asked for.
struct DeviceEvents {
  // Kernels, by the name of the function for those of kernels/cuda, by that of
  // the operator for LibTorch's. An operator counts as one launch; those that
  // launch more on a device are spelled out.
  std::vector<std::string> launches;
  // Copies to the device that the host does not wait for.
  std::vector<std::string> uploads;
  // What the host waits for: values that it reads, copies of memory that is not
  // pinned, and calls that wait.
  std::vector<std::string> waits;
};

// Notes them while it lives. One at a time.
class DeviceRecording {
 public:
  DeviceRecording();
  ~DeviceRecording();
  DeviceRecording(const DeviceRecording&) = delete;
  DeviceRecording& operator=(const DeviceRecording&) = delete;

  [[nodiscard]] const DeviceEvents& events() const { return events_; }

 private:
  DeviceEvents events_;
};

// Pieces of the device's memory that tensors hold, the results of operators
// too.
[[nodiscard]] int64_t NumLiveAllocations();

// For the files of this folder: how many more or fewer there are; the events of
// the recording that lives, or of nobody.
void AddLiveAllocations(int64_t count);
[[nodiscard]] DeviceEvents& CurrentEvents();

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_DEVICE_H_
