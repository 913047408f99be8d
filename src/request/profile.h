// A request for a profile of the engine.
#ifndef WEFT_SRC_REQUEST_PROFILE_H_
#define WEFT_SRC_REQUEST_PROFILE_H_

#include <cstdint>

#include "absl/time/time.h"

namespace weft {

inline constexpr int64_t kMaxProfileSteps = 100000;
inline constexpr int kMaxProfileSeconds = 300;
inline constexpr int kDefaultProfileSeconds = 10;

// The profile ends after `steps` pieces of work (micro-batches, steps that run
// alone, decode iterations), or after `duration`. Drain ends it earlier.
struct ProfileRequest {
  int64_t steps = 0;  // 0: no limit.
  absl::Duration duration = absl::Seconds(kDefaultProfileSeconds);
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_PROFILE_H_
