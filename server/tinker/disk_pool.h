// Runs work that reads files on threads of its own, so that the front's thread
// never waits for the disk.
#ifndef WEFT_SERVER_TINKER_DISK_POOL_H_
#define WEFT_SERVER_TINKER_DISK_POOL_H_

#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "server/tinker/owner_turns.h"
#include "src/base/mutex.h"

namespace weft::tinker {

// Runs work on a fixed number of threads, for which owners take turns. TryRun
// refuses work if too much of its owner waits. The class Worker
// (src/base/worker.h) has one thread instead, and refuses no work.
// Threads: any.
class DiskPool {
 public:
  using Work = std::function<void()>;

  // Starts the threads. While `max_waiting` pieces of an owner's work wait for
  // a thread, TryRun refuses more.
  DiskPool(size_t num_threads, size_t max_waiting);
  // Runs all work that waits, and joins the threads.
  ~DiskPool();
  DiskPool(const DiskPool&) = delete;
  DiskPool& operator=(const DiskPool&) = delete;

  // Passes `work` to the threads. Returns false if too much of the owner's work
  // waits; `work` then never runs.
  [[nodiscard]] bool TryRun(const std::string& owner, Work work)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Loop() ABSL_LOCKS_EXCLUDED(mu_);

  const size_t max_waiting_;
  Mutex mu_;
  CondVar changed_;
  OwnerTurns<Work> waiting_ ABSL_GUARDED_BY(mu_);
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_DISK_POOL_H_
