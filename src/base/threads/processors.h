// How many processors other processes leave to this one.
#ifndef WEFT_SRC_BASE_THREADS_PROCESSORS_H_
#define WEFT_SRC_BASE_THREADS_PROCESSORS_H_

#include <optional>
#include <string>
#include <utility>

#include "absl/time/time.h"

namespace weft {

// Threads: one at a time.
class ProcessorShare {
 public:
  // `root` is the root of the file system.
  explicit ProcessorShare(std::string root = "") : root_(std::move(root)) {}

  // Returns the processors, of those that the caller's affinity allows, that
  // this process has used since the last call, plus those that were idle.
  // Absent at the first call, and if the kernel does not say. Costs up to a
  // millisecond.
  std::optional<double> Look();

 private:
  struct Reading {
    absl::Time time;
    absl::Duration idle;  // Sum over the processors.
    absl::Duration used;  // By all threads of this process.
  };
  std::optional<Reading> Read() const;

  std::string root_;
  std::optional<Reading> last_;
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_THREADS_PROCESSORS_H_
