#include "src/base/threads/worker.h"

#include <utility>

#include "src/base/trace_id.h"

namespace weft {

Worker::Worker(size_t num_threads) {
  for (size_t i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this] { Loop(); });
  }
}

void Worker::Post(std::function<void()> task, const std::string& owner) {
  {
    MutexLock lock(&mu_);
    waiting_[owner].push_back(KeepTrace(std::move(task)));
  }
  changed_.NotifyOne();
}

void Worker::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Worker::Discard() {
  decltype(waiting_) dropped;
  {
    MutexLock lock(&mu_);
    dropped.swap(waiting_);
  }
  dropped.clear();
  Stop();
}

std::function<void()> Worker::Take() {
  auto turn = waiting_.upper_bound(last_);
  if (turn == waiting_.end()) turn = waiting_.begin();
  last_ = turn->first;
  std::function<void()> task = std::move(turn->second.front());
  turn->second.pop_front();
  if (turn->second.empty()) waiting_.erase(turn);
  return task;
}

void Worker::Loop() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&mu_);
      while (waiting_.empty() && !stopping_) changed_.Wait(&mu_);
      if (waiting_.empty()) return;
      task = Take();
    }
    task();
  }
}

}  // namespace weft
