#include "src/engine/decode/decode_threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "absl/cleanup/cleanup.h"
#include "src/base/clock.h"

namespace weft::engine {
namespace {

// The kernel counts idle time in steps of 10 ms.
constexpr absl::Duration kInterval = absl::Milliseconds(250);

}  // namespace

int DecodeThreads::Choose(int most) {
  if (const absl::Time now = SteadyNow(); now >= next_look_) {
    next_look_ = now + kInterval;
    left_ = share_.Look().value_or(0);
  }
  if (left_ == 0) return most;
  return std::clamp(static_cast<int>(std::lround(left_)), 1, most);
}

void DecodeThreads::Run(c10::function_ref<void()> run) {
  const int most = at::get_num_threads();
  const int threads = adapts_ ? Choose(most) : most;
  if (threads == most) return run();
  at::set_num_threads(threads);
  const absl::Cleanup restore = [most] { at::set_num_threads(most); };
  run();
}

}  // namespace weft::engine
