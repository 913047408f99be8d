// A CUDA device of LibTorch on the host. A test that links it can use tensors
// of at::kCUDA without CUDA's libraries. Their memory is on the heap, and their
// operators run at once, on the CPU. kernels/cuda are compiled for the host
// (../cuda_on_host). So all device code of a build with CUDA runs, and every
// launch is a call that can be counted.
//
// The headers of c10/cuda in this folder replace headers that need CUDA. An
// operator that mixes tensors of host and device is refused as on a device. New
// memory holds NaN. A kernel that gets a host address is not detected.
#ifndef WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_DEVICE_H_
#define WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_DEVICE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace weft::testing {

// The device's recorded operations.
struct DeviceEvents {
  // Launched kernels: function names for kernels/cuda, operator names for
  // LibTorch. An operator counts as one launch, unless it is known to launch
  // more on a device.
  std::vector<std::string> launches;
  // Copies to the device for which the host does not wait.
  std::vector<std::string> uploads;
  // Operations for which the host waits: reads of values, copies of memory that
  // is not pinned, and calls that wait.
  std::vector<std::string> waits;
};

// Records operations while the object exists. Only one may exist at a time.
class DeviceRecording {
 public:
  DeviceRecording();
  ~DeviceRecording();
  DeviceRecording(const DeviceRecording&) = delete;
  DeviceRecording& operator=(const DeviceRecording&) = delete;

  const DeviceEvents& events() const { return events_; }

 private:
  DeviceEvents events_;
};

// Returns the number of blocks of device memory that are held by tensors,
// including the results of operators.
int64_t NumLiveAllocations();

// Only the files of this folder use the two functions below. The first changes
// the number of blocks. The second returns the events of the current recording.
// Without a recording, nothing reads these events.
void AddLiveAllocations(int64_t count);
DeviceEvents& CurrentEvents();

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_HOST_DEVICE_HOST_DEVICE_H_
