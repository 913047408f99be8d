#include "server/tinker/disk_pool.h"

#include <utility>

namespace weft::tinker {

DiskPool::DiskPool(size_t num_threads, size_t max_waiting)
    : max_waiting_(max_waiting) {
  for (size_t i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this] { Loop(); });
  }
}

DiskPool::~DiskPool() {
  {
    MutexLock lock(&mu_);
    ending_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

bool DiskPool::TryRun(const std::string& owner, Work work) {
  {
    MutexLock lock(&mu_);
    if (waiting_.CountOf(owner) >= max_waiting_) return false;
    waiting_.Add(owner, std::move(work));
  }
  changed_.NotifyOne();
  return true;
}

void DiskPool::Loop() {
  while (true) {
    Work work;
    {
      MutexLock lock(&mu_);
      while (waiting_.empty() && !ending_) changed_.Wait(&mu_);
      if (waiting_.empty()) return;
      work = waiting_.Take();
    }
    work();
  }
}

}  // namespace weft::tinker
