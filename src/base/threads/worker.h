// A thread with a queue of tasks. Tasks run one after the other, in the order
// in which they were posted, with the trace id of the thread that posted them.
#ifndef WEFT_SRC_BASE_THREADS_WORKER_H_
#define WEFT_SRC_BASE_THREADS_WORKER_H_

#include <deque>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "src/base/threads/mutex.h"
#include "src/base/trace_id.h"

namespace weft {

// Threads: any thread may post. Tasks must not throw.
class Worker {
 public:
  Worker() : thread_([this] { Loop(); }) {}
  ~Worker() { Stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void Post(std::function<void()> task) {
    {
      MutexLock lock(&mu_);
      tasks_.push_back(KeepTrace(std::move(task)));
    }
    changed_.NotifyOne();
  }

  // Runs all posted tasks and joins. Later tasks do not run. Any thread but the
  // worker's own may call it, one at a time.
  void Stop() {
    if (!thread_.joinable()) return;
    {
      MutexLock lock(&mu_);
      stopping_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }

 private:
  void Loop() {
    for (;;) {
      std::function<void()> task;
      {
        MutexLock lock(&mu_);
        while (tasks_.empty() && !stopping_) changed_.Wait(&mu_);
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_THREADS_WORKER_H_
