// Threads that read files, so that the front's thread never waits for the disk.
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

// Runs work on a fixed number of threads. Work begins in the order in which it
// comes, and is refused when too much waits. For work that must not be refused
// and must end in order, see src/base/worker.h.
// Threads: any.
class DiskPool {
 public:
  using Work = std::function<void()>;

  // TryRun refuses work while `max_waiting` pieces of work wait.
  DiskPool(size_t num_threads, size_t max_waiting);
  // Runs all work that waits, and joins the threads.
  ~DiskPool();
  DiskPool(const DiskPool&) = delete;
  DiskPool& operator=(const DiskPool&) = delete;

  // Has a thread run `work`. Returns false if too much work waits; then `work`
  // does not run.
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
