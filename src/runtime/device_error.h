// Which errors of a CUDA device end the process, and which only the request
// that met them.
#ifndef WEFT_SRC_RUNTIME_DEVICE_ERROR_H_
#define WEFT_SRC_RUNTIME_DEVICE_ERROR_H_

namespace weft::engine {

// What a device says when it is asked after a failure: numbers of cudaError_t,
// 0 for success.
struct DeviceAnswer {
  int waiting = 0;  // To "are you done?", with what had gone wrong meanwhile.
  int again = 0;    // To the same, once that was taken note of.
};

// True when the device computes nothing any more for this process: an error
// that stays, or one of those after which CUDA's context is undefined (an
// illegal address, a device-side assertion, a launch that failed or never
// ended, memory that ECC could not correct).
[[nodiscard]] bool IsLost(const DeviceAnswer& answer);

}  // namespace weft::engine

#endif  // WEFT_SRC_RUNTIME_DEVICE_ERROR_H_
