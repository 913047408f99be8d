// Runs work of the engine thread during which the device or another rank may
// fail. Turns exceptions into a status. Detects and remembers the loss of the
// device or of a rank.
#ifndef WEFT_SRC_ENGINE_DEVICE_COMPUTE_GUARD_H_
#define WEFT_SRC_ENGINE_DEVICE_COMPUTE_GUARD_H_

#include <functional>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"
#include "src/engine/device/compute_device.h"
#include "src/executor/executor.h"

namespace weft::engine {

// Runs `body` and converts exceptions. Exhausted device memory and
// std::bad_alloc become RESOURCE_EXHAUSTED. An operation that LibTorch lacks
// becomes UNIMPLEMENTED. Any other std::exception becomes INTERNAL. `what`
// names the work in the message and the log.
absl::Status RunGuarded(const char* what, const std::function<void()>& body);

class ComputeGuard {
 public:
  // The arguments outlive the guard.
  ComputeGuard(ComputeDevice* device, executor::Executor* executor)
      : device_(*device), executor_(*executor) {}

  // The engine thread calls the methods below.

  // Like RunGuarded. After an error, checks whether the device still computes,
  // unless Executor::failed is true. If the device does not, returns
  // UNAVAILABLE, and failure() returns UNAVAILABLE from then on. If memory ran
  // out, frees cached memory before the check. Runs `body` even if failure() is
  // not OK.
  absl::Status Guarded(const char* what, const std::function<void()>& body);
  // Like Guarded, for work that all ranks run. If failure() is not OK, returns
  // it and does not run `body`. If Executor::failed is true after `body`,
  // returns UNAVAILABLE, or RESOURCE_EXHAUSTED if memory ran out, and failure()
  // returns UNAVAILABLE from then on.
  absl::Status Compute(const char* what, const std::function<void()>& body);
  // Checks that the other ranks are alive, but at most once a second. If a rank
  // is not alive, failure() returns UNAVAILABLE from then on.
  void PingWhenDue();

  // Returns UNAVAILABLE after the loss of the device or of a rank, otherwise
  // OK. Any thread may call this method.
  absl::Status failure() const;

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

#endif  // WEFT_SRC_ENGINE_DEVICE_COMPUTE_GUARD_H_
