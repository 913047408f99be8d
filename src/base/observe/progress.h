// Shows the progress of long work: as a bar if stderr is a terminal, otherwise
// as a log line at most every five seconds.
//
//   Progress progress("loading weights", total_bytes, "B");
//   progress.Add(bytes_read);
//
// The destructor prints the final state.
// Threads: Add may be called from any thread.
#ifndef WEFT_SRC_BASE_OBSERVE_PROGRESS_H_
#define WEFT_SRC_BASE_OBSERVE_PROGRESS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"

namespace weft {

class Progress {
 public:
  // `unit` is "B" for bytes (printed with SI prefixes) or a plural noun. If
  // `total` is 0, the total is unknown, and no bar, percentage or ETA is shown.
  Progress(std::string_view label, int64_t total, std::string_view unit);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Add(int64_t amount);

  // Returns the time that the rest takes at the mean speed so far; 0 if it is
  // not known.
  absl::Duration TimeLeft() const;

  // Returns the line for a given state, without control characters. If
  // bar_width is 0, the line has no bar.
  static std::string Format(std::string_view label, int64_t done, int64_t total,
                            std::string_view unit, absl::Duration elapsed,
                            int bar_width);

 private:
  void Print(bool last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string label_;
  const int64_t total_;
  const std::string unit_;
  const bool is_terminal_;
  const absl::Time start_;
  mutable Mutex mu_;
  int64_t done_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time last_print_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_OBSERVE_PROGRESS_H_
