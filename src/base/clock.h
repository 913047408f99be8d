// A source of time. Tests replace it to test schedulers and deadlines without
// waiting.
#ifndef WEFT_SRC_BASE_CLOCK_H_
#define WEFT_SRC_BASE_CLOCK_H_

#include <ctime>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace weft {

// Returns the time for deadlines, ages and intervals. It moves on with the
// machine, and a change of the wall clock does not change it. At its first call
// it equals the wall clock. absl::Now() is for times that are shown, or that
// other processes read.
inline absl::Time SteadyNow() {
  const auto uptime = [] {
    timespec now = {};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return absl::DurationFromTimespec(now);
  };
  static const absl::Time boot = absl::Now() - uptime();
  return boot + uptime();
}

class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
};

// Threads: any.
class RealClock final : public Clock {
 public:
  absl::Time Now() const override { return SteadyNow(); }
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_CLOCK_H_
