// A source of time. Tests replace it to test schedulers and deadlines without
// waiting.
#ifndef WEFT_SRC_BASE_CLOCK_H_
#define WEFT_SRC_BASE_CLOCK_H_

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace weft {

class Clock {
 public:
  virtual ~Clock() = default;
  [[nodiscard]] virtual absl::Time Now() const = 0;
};

// Threads: any.
class RealClock final : public Clock {
 public:
  [[nodiscard]] absl::Time Now() const override { return absl::Now(); }
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_CLOCK_H_
