// Threads with a queue of tasks. Tasks run with the trace id of the thread that
// posted them.
#ifndef WEFT_SRC_BASE_THREADS_WORKER_H_
#define WEFT_SRC_BASE_THREADS_WORKER_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "src/base/threads/mutex.h"

namespace weft {

// One thread runs an owner's tasks one after the other, in the order in which
// they were posted. The owners take turns, so nobody waits for more than one
// task of each other owner. The server itself, whose name is empty, has every
// second turn. The limits of those who post bound how much waits.
// Threads: any thread may post. Tasks must not throw.
class Worker {
 public:
  explicit Worker(size_t num_threads = 1);
  ~Worker() { Stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // The worker's threads destroy `task`. So what must end on another thread has
  // to be moved out of it. A lambda that does so must be mutable, and capture
  // `x = x`: the plain capture of a const reference is const, so a move would
  // copy it.
  void Post(std::function<void()> task, const std::string& owner = "")
      ABSL_LOCKS_EXCLUDED(mu_);

  // Runs all posted tasks and joins. Later tasks do not run. Any thread but the
  // worker's own may call it, one at a time.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // Drops the tasks that wait, and does what Stop does.
  void Discard() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Loop() ABSL_LOCKS_EXCLUDED(mu_);
  // Takes the first task of the owner whose turn it is. REQUIRES: a task waits.
  std::function<void()> Take() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar changed_;
  // The tasks by owner. An owner without any has no entry.
  std::map<std::string, std::deque<std::function<void()>>> waiting_
      ABSL_GUARDED_BY(mu_);
  // The owners with tasks, without the server, whose turn is first in front.
  std::deque<std::string> turns_ ABSL_GUARDED_BY(mu_);
  bool last_was_servers_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_THREADS_WORKER_H_
