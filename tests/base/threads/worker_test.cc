#include "src/base/threads/worker.h"

#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
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

TEST(WorkerTest, OwnersTakeTurns) {
  std::string done;
  std::latch begun(1);
  std::latch posted(1);
  Worker worker;
  const auto first = [&] {
    begun.count_down();
    posted.wait();
  };
  worker.Post(first, "b");
  begun.wait();
  for (const std::string name : {"c1", "a1", "a2", "a3", "b1"}) {
    worker.Post([&, name] { done += name; }, name.substr(0, 1));
  }
  for (int i = 0; i < 3; ++i) worker.Post([&] { done += "s "; });
  posted.count_down();
  worker.Stop();
  EXPECT_EQ(done, "s c1s a1s b1a2a3");
}

TEST(WorkerTest, DiscardDropsWhatWaits) {
  bool ran = false;
  std::latch begun(1);
  std::latch dropped(1);
  Worker worker;
  worker.Post([&] {
    begun.count_down();
    dropped.wait();
  });
  begun.wait();
  std::shared_ptr<void> kept(nullptr, [&](void*) { dropped.count_down(); });
  worker.Post([&ran, kept = std::move(kept)] { ran = true; });
  worker.Discard();
  EXPECT_FALSE(ran);
}

}  // namespace
}  // namespace weft
