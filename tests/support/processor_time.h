// The processor time of this process. Unlike wall-clock time it does not depend
// on other processes.
#ifndef WEFT_TESTS_SUPPORT_PROCESSOR_TIME_H_
#define WEFT_TESTS_SUPPORT_PROCESSOR_TIME_H_

#include <ctime>

#include "absl/base/config.h"

namespace weft {

class ProcessorTime {
 public:
  // Returns the processor time of all threads since the object was created,
  // scaled to about that of a build without sanitizers.
  [[nodiscard]] double Seconds() const {
#if defined(ABSL_HAVE_THREAD_SANITIZER)
    constexpr double kSlowdown = 10;
#elif defined(ABSL_HAVE_ADDRESS_SANITIZER)
    constexpr double kSlowdown = 3;
#else
    constexpr double kSlowdown = 1;
#endif
    return static_cast<double>(std::clock() - start_) / CLOCKS_PER_SEC /
           kSlowdown;
  }

 private:
  const std::clock_t start_ = std::clock();
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_PROCESSOR_TIME_H_
