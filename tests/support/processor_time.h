// The processor time of this process. Unlike wall-clock time it does not depend
// on other processes.
#ifndef WEFT_TESTS_SUPPORT_PROCESSOR_TIME_H_
#define WEFT_TESTS_SUPPORT_PROCESSOR_TIME_H_

#include <ctime>

#include "tests/support/sanitizer_slowdown.h"

namespace weft {

class ProcessorTime {
 public:
  // Returns the processor time of all threads since the object was created,
  // scaled to about that of a build without sanitizers.
  double Seconds() const {
    return static_cast<double>(std::clock() - start_) / CLOCKS_PER_SEC /
           kSanitizerSlowdown;
  }

 private:
  const std::clock_t start_ = std::clock();
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_PROCESSOR_TIME_H_
