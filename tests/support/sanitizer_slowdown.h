// How much slower a build with sanitizers is.
#ifndef WEFT_TESTS_SUPPORT_SANITIZER_SLOWDOWN_H_
#define WEFT_TESTS_SUPPORT_SANITIZER_SLOWDOWN_H_

#include "absl/base/config.h"

namespace weft {

// The approximate processor time of this build, divided by the processor time
// of a build without sanitizers.
#if defined(ABSL_HAVE_THREAD_SANITIZER)
inline constexpr int kSanitizerSlowdown = 10;
#elif defined(ABSL_HAVE_ADDRESS_SANITIZER)
inline constexpr int kSanitizerSlowdown = 3;
#else
inline constexpr int kSanitizerSlowdown = 1;
#endif

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_SANITIZER_SLOWDOWN_H_
