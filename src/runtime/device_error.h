// Tells whether a CUDA error ends the process or fails only one request.
#ifndef WEFT_SRC_RUNTIME_DEVICE_ERROR_H_
#define WEFT_SRC_RUNTIME_DEVICE_ERROR_H_

namespace weft::engine {

// What a device reports after a failure, as values of cudaError_t. 0 is
// success.
struct DeviceAnswer {
  int waiting = 0;  // The error of the first query.
  int again = 0;    // The error after the first was cleared.
};

// Returns whether the device no longer computes for this process: the error
// stays, or CUDA's context is unusable after it. The context is unusable after
// an illegal address, a device-side assertion, a launch that failed or never
// ended, or memory that ECC could not correct.
[[nodiscard]] bool IsLost(const DeviceAnswer& answer);

}  // namespace weft::engine

#endif  // WEFT_SRC_RUNTIME_DEVICE_ERROR_H_
