#include "server/tinker/turns.h"

#include <utility>

namespace weft::server::tinker {

TurnPool::TurnPool(size_t num_threads) {
  for (size_t i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this] { Loop(); });
  }
}

TurnPool::~TurnPool() {
  {
    MutexLock lock(&mu_);
    ending_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void TurnPool::Run(const std::string& owner, Work work) {
  {
    MutexLock lock(&mu_);
    waiting_[owner].push_back(std::move(work));
  }
  changed_.NotifyOne();
}

TurnPool::Work TurnPool::Take() {
  auto turn = waiting_.upper_bound(last_);
  if (turn == waiting_.end()) turn = waiting_.begin();
  last_ = turn->first;
  Work work = std::move(turn->second.front());
  turn->second.pop_front();
  if (turn->second.empty()) waiting_.erase(turn);
  return work;
}

void TurnPool::Loop() {
  while (true) {
    Work work;
    {
      MutexLock lock(&mu_);
      while (waiting_.empty() && !ending_) changed_.Wait(&mu_);
      if (ending_) return;
      work = Take();
    }
    work();
  }
}

}  // namespace weft::server::tinker
