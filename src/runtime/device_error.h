// Tells errors of a CUDA device that end the process from errors that fail only
// one request.
#ifndef WEFT_SRC_RUNTIME_DEVICE_ERROR_H_
#define WEFT_SRC_RUNTIME_DEVICE_ERROR_H_

namespace weft::engine {

// A device's answers after a failure: numbers of cudaError_t, 0 for success.
struct DeviceAnswer {
  int waiting = 0;  // The first query's error.
  int again = 0;    // The error after it was cleared.
};

// Returns whether the device computes nothing any more for this process: the
// error stays, or CUDA's context is undefined after it (an illegal address, a
// device-side assertion, a launch that failed or never ended, memory that ECC
// could not correct).
[[nodiscard]] bool IsLost(const DeviceAnswer& answer);

}  // namespace weft::engine

#endif  // WEFT_SRC_RUNTIME_DEVICE_ERROR_H_
