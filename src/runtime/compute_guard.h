// Runs all work in which the device or another rank may fail. Turns exceptions
// into a status. Detects the loss of the device or of a rank, and remembers it.
#ifndef WEFT_SRC_RUNTIME_COMPUTE_GUARD_H_
#define WEFT_SRC_RUNTIME_COMPUTE_GUARD_H_

#include <functional>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/mutex.h"
#include "src/executor/executor.h"
#include "src/runtime/compute_device.h"

namespace weft::engine {

class ComputeGuard {
 public:
  // Both outlive the guard.
  ComputeGuard(ComputeDevice* device, executor::Executor* executor)
      : device_(*device), executor_(*executor) {}

  // The engine thread calls the methods below.

  // Like RunGuarded. After an error, also frees cached memory and checks
  // whether the device still computes. If it does not, this call and all later
  // ones return UNAVAILABLE.
  [[nodiscard]] absl::Status Guarded(const char* what,
                                     const std::function<void()>& body);
  // Like Guarded, for work that all ranks run. Also returns UNAVAILABLE if
  // another rank is lost.
  [[nodiscard]] absl::Status Compute(const char* what,
                                     const std::function<void()>& body);
  // Checks, at most once a second, that the other ranks are alive.
  void PingWhenDue();

  // Returns UNAVAILABLE after the loss of the device or of a rank. Any thread
  // may call it.
  [[nodiscard]] absl::Status failure() const;

 private:
  absl::Status Fail(const char* what, const absl::Status& reason,
                    std::string_view message);

  ComputeDevice& device_;
  executor::Executor& executor_;
  absl::Time last_ping_ = absl::InfinitePast();  // Used by the engine thread.
  mutable Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::engine

#endif  // WEFT_SRC_RUNTIME_COMPUTE_GUARD_H_
