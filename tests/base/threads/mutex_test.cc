#include "src/base/threads/mutex.h"

#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace weft {
namespace {

// Has thread-safety annotations, so that a clang build also checks the
// annotations of Mutex, MutexLock and CondVar.
class Counter {
 public:
  void Add() {
    {
      MutexLock lock(&mu_);
      ++value_;
    }
    changed_.NotifyAll();
  }

  void WaitFor(int value) {
    MutexLock lock(&mu_);
    while (value_ < value) changed_.Wait(&mu_);
  }

  bool WaitBriefly() {
    MutexLock lock(&mu_);
    return changed_.WaitFor(&mu_, std::chrono::milliseconds(1));
  }

  int Get() {
    mu_.Lock();
    const int value = value_;
    mu_.Unlock();
    return value;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  int value_ ABSL_GUARDED_BY(mu_) = 0;
};

TEST(MutexTest, CountsExactlyUnderContention) {
  Counter counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&counter] {
      for (int j = 0; j < 500; ++j) counter.Add();
    });
  }
  counter.WaitFor(2000);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter.Get(), 2000);
}

TEST(CondVarTest, WakesAWaiter) {
  Counter counter;
  std::thread waiter([&counter] { counter.WaitFor(1); });
  counter.Add();
  waiter.join();
}

TEST(CondVarTest, StillHoldsTheMutexAfterATimeout) {
  Counter counter;
  counter.WaitBriefly();
  counter.Add();  // This would deadlock if the mutex were still locked.
  EXPECT_EQ(counter.Get(), 1);
}

}  // namespace
}  // namespace weft
