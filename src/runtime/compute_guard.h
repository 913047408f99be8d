// Everything that may make the device or another rank fail runs through here:
// exceptions become a status, and a device or another rank that is lost is
// noticed once and remembered.
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

  // Engine thread.

  // As RunGuarded. After an error gives back memory that nobody uses, and asks
  // the device whether it still computes: if not, this and all that computes
  // from now on is UNAVAILABLE.
  [[nodiscard]] absl::Status Guarded(const char* what,
                                     const std::function<void()>& body);
  // As Guarded, for a body that all ranks run. UNAVAILABLE, too, when another
  // rank is gone.
  [[nodiscard]] absl::Status Compute(const char* what,
                                     const std::function<void()>& body);
  // Asks the other ranks, if there are any, whether they are there; at most
  // once a second.
  void PingWhenDue();

  // UNAVAILABLE once nothing can be computed any more. Any thread.
  [[nodiscard]] absl::Status failure() const;

 private:
  absl::Status Fail(const char* what, const absl::Status& reason,
                    std::string_view message);

  ComputeDevice& device_;
  executor::Executor& executor_;
  absl::Time last_ping_ = absl::InfinitePast();  // Engine thread.
  mutable Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::engine

#endif  // WEFT_SRC_RUNTIME_COMPUTE_GUARD_H_
