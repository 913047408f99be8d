#include "src/base/threads/worker.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace weft {
namespace {

TEST(WorkerTest, RunsTasksInTheOrderPostedAndFinishesThem) {
  std::vector<int> order;
  {
    Worker worker;
    for (int i = 0; i < 100; ++i) {
      worker.Post([&order, i] { order.push_back(i); });
    }
  }
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(WorkerTest, RunsWhatATaskPosts) {
  int runs = 0;
  {
    Worker worker;
    worker.Post([&] { worker.Post([&] { ++runs; }); });
  }
  EXPECT_EQ(runs, 1);
}

TEST(WorkerTest, TakesTasksFromManyThreads) {
  int runs = 0;  // Only the worker's thread uses it.
  {
    Worker worker;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int j = 0; j < 50; ++j) worker.Post([&runs] { ++runs; });
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(runs, 200);
}

}  // namespace
}  // namespace weft
