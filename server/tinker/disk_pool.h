// Runs work that reads files on threads of its own, so that the front's thread
// never waits for the disk.
#ifndef WEFT_SERVER_TINKER_DISK_POOL_H_
#define WEFT_SERVER_TINKER_DISK_POOL_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "src/base/mutex.h"

namespace weft::tinker {

// Runs work on a fixed number of threads. Threads take the work in the order of
// the calls of TryRun, which refuses work if too much waits. The class Worker
// (src/base/worker.h) has one thread instead, and refuses no work.
// Threads: any.
class DiskPool {
 public:
  using Work = std::function<void()>;

  // Starts the threads. While `max_waiting` pieces of work wait for a thread,
  // TryRun refuses more.
  DiskPool(size_t num_threads, size_t max_waiting);
  // Runs all work that waits, and joins the threads.
  ~DiskPool();
  DiskPool(const DiskPool&) = delete;
  DiskPool& operator=(const DiskPool&) = delete;

  // Passes `work` to the threads. Returns false if too much work waits; `work`
  // then never runs.
  [[nodiscard]] bool TryRun(Work work) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Loop() ABSL_LOCKS_EXCLUDED(mu_);

  const size_t max_waiting_;
  Mutex mu_;
  CondVar changed_;
  std::deque<Work> waiting_ ABSL_GUARDED_BY(mu_);
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_DISK_POOL_H_
