// Runs calls that wait, such as requests to a store, several at once.
#ifndef WEFT_SRC_BASE_THREADS_AT_ONCE_H_
#define WEFT_SRC_BASE_THREADS_AT_ONCE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <system_error>
#include <vector>

#include "absl/status/status.h"

namespace weft {

// Calls work(i), which returns a Status, for each `i` below `count`: at most
// `most` of them at once, in threads of their own and in the caller's. Begins
// no more of them after an error. Returns when all that began have ended.
// Errors: the first of the lowest `i`.
template <typename Work>
absl::Status RunAtOnce(size_t count, size_t most, const Work& work) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<absl::Status> ends(count);
  const auto run = [&] {
    for (size_t i = next++; i < count && !failed; i = next++) {
      ends[i] = work(i);
      if (!ends[i].ok()) failed = true;
    }
  };
  std::vector<std::future<void>> others;
  for (size_t i = 1; i < std::min(count, most); ++i) {
    try {
      others.push_back(std::async(std::launch::async, run));
    } catch (const std::system_error&) {
      break;  // The system gives no more threads, and fewer do all the work.
    }
  }
  run();
  for (std::future<void>& other : others) other.get();
  const auto error = std::ranges::find_if_not(ends, &absl::Status::ok);
  return error == ends.end() ? absl::OkStatus() : *error;
}

}  // namespace weft

#endif  // WEFT_SRC_BASE_THREADS_AT_ONCE_H_
