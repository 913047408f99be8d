// Tells whether a CUDA error ends the process or fails only one request.
#ifndef WEFT_SRC_ENGINE_DEVICE_DEVICE_ERROR_H_
#define WEFT_SRC_ENGINE_DEVICE_DEVICE_ERROR_H_

namespace weft::engine {

// A device's answers to two queries after a failure, as values of cudaError_t.
// 0 is success.
struct DeviceAnswer {
  int waiting = 0;  // The error of the first query; it is then cleared.
  int again = 0;    // The error of the second query.
};

// Returns whether the device no longer computes for this process: the second
// query fails too, or CUDA's context is unusable after the first error, such as
// an illegal address, a device-side assertion or a failed launch.
bool IsLost(const DeviceAnswer& answer);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DEVICE_DEVICE_ERROR_H_
