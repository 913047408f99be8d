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
    std::deque<std::function<void()>>& tasks = waiting_[owner];
    if (tasks.empty() && !owner.empty()) turns_.push_back(owner);
    tasks.push_back(KeepTrace(std::move(task)));
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
    turns_.clear();
  }
  dropped.clear();
  Stop();
}

std::function<void()> Worker::Take() {
  std::string owner;
  const bool is_servers =
      turns_.empty() || (!last_was_servers_ && waiting_.contains(""));
  last_was_servers_ = is_servers;
  if (!is_servers) {
    owner = std::move(turns_.front());
    turns_.pop_front();
  }
  const auto turn = waiting_.find(owner);
  std::function<void()> task = std::move(turn->second.front());
  turn->second.pop_front();
  if (turn->second.empty()) {
    waiting_.erase(turn);
  } else if (!is_servers) {
    turns_.push_back(std::move(owner));
  }
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
