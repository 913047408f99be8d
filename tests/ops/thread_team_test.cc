#include "src/ops/thread_team.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "src/ops/matmul.h"

namespace weft::ops {
namespace {

using Parts = std::set<std::pair<int64_t, int64_t>>;

class ThreadTeamTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::set_num_threads(GetParam()); }
  void TearDown() override { at::set_num_threads(before_); }

 private:
  const int before_ = at::get_num_threads();
};

// Returns the parts into which `loop` cuts its iterations.
template <typename Loop>
Parts PartsOf(const Loop& loop) {
  std::mutex mutex;
  Parts parts;
  loop([&](int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    parts.emplace(begin, end);
  });
  return parts;
}

TEST_P(ThreadTeamTest, CutsALoopLikeAten) {
  for (const int64_t count : {0, 1, 2, 3, 5, 64, 1001}) {
    for (const int64_t grain : {1, 3, 600, 5000}) {
      const Parts expected =
          PartsOf([&](auto run) { at::parallel_for(0, count, grain, run); });
      const auto loop = [&](auto run) { ParallelFor(count, grain, run); };
      EXPECT_EQ(PartsOf(loop), expected) << count << " " << grain;
      Parts parts;
      WithThreadTeam({}, [&] { parts = PartsOf(loop); });
      EXPECT_EQ(parts, expected) << count << " " << grain << " in a team";
    }
  }
}

TEST_P(ThreadTeamTest, RunsManyLoopsInOrder) {
  std::vector<int64_t> values(97, 0);
  WithThreadTeam({}, [&] {
    for (int64_t round = 0; round < 2000; ++round) {
      ParallelFor(std::ssize(values), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          if (values[i] == round) ++values[i];
        }
      });
    }
  });
  EXPECT_EQ(values, std::vector<int64_t>(97, 2000));
}

TEST_P(ThreadTeamTest, WakesThreadsThatSleep) {
  std::atomic<int64_t> sum = 0;
  WithThreadTeam({}, [&] {
    for (int round = 0; round < 3; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ParallelFor(8, 1, [&](int64_t begin, int64_t end) {
        // The thread of the step runs the first part. It finishes early, so
        // it sleeps while it waits for the other parts.
        if (begin > 0)
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        sum += end - begin;
      });
    }
  });
  EXPECT_EQ(sum, 24);
}

TEST_P(ThreadTeamTest, RunsALoopWithinALoopOnOneThread) {
  std::atomic<int64_t> sum = 0;
  WithThreadTeam({}, [&] {
    ParallelFor(8, 1, [&](int64_t begin, int64_t end) {
      const std::thread::id own = std::this_thread::get_id();
      for (int64_t i = begin; i < end; ++i) {
        ParallelFor(10, 1, [&](int64_t first, int64_t last) {
          EXPECT_EQ(std::this_thread::get_id(), own);
          sum += last - first;
        });
      }
    });
  });
  EXPECT_EQ(sum, 80);
}

TEST_P(ThreadTeamTest, RethrowsAnExceptionOfTheStep) {
  const auto step = [] {
    ParallelFor(8, 1, [](int64_t, int64_t) {});
    throw std::runtime_error("of the step");
  };
  EXPECT_THROW(WithThreadTeam({}, step), std::runtime_error);
}

TEST_P(ThreadTeamTest, RethrowsAnExceptionOfALoop) {
  for (const int64_t bad : {0, 7}) {
    std::atomic<int64_t> later = 0;
    const auto step = [&] {
      ParallelFor(8, 1, [&](int64_t begin, int64_t end) {
        if (begin <= bad && bad < end) throw std::runtime_error("of a loop");
      });
      // If a part on another thread throws, the step continues with this loop.
      ParallelFor(8, 1,
                  [&](int64_t begin, int64_t end) { later += end - begin; });
    };
    EXPECT_THROW(WithThreadTeam({}, step), std::runtime_error) << bad;
    EXPECT_LE(later, 8);
  }
  // After an exception, the next team runs all parts.
  std::atomic<int64_t> sum = 0;
  WithThreadTeam({}, [&] {
    ParallelFor(8, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  });
  EXPECT_EQ(sum, 8);
}

// In a team, products have the same bits whether the given order of weights is
// right, wrong or empty.
TEST_P(ThreadTeamTest, ProductsHaveTheSameBits) {
  const at::Tensor first_OI = at::randn({1000, 96});
  const at::Tensor second_OI = at::randn({301, 1000}).to(at::kBFloat16);
  const at::Tensor x_MI = at::randn({3, 96});
  const auto product = [&] {
    return Linear(Linear(x_MI, first_OI), second_OI);
  };
  const at::Tensor expected = product();
  const SharedRows first = RowsOf(first_OI, 1000, 96);
  const SharedRows second = RowsOf(second_OI, 301, 1000);
  const std::vector<std::vector<SharedRows>> orders = {
      {}, {first, second}, {second, first}, {first}, {first, first}};
  for (const std::vector<SharedRows>& order : orders) {
    WithThreadTeam(order, [&] {
      for (int round = 0; round < 3; ++round) {
        EXPECT_TRUE(at::equal(product(), expected));
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadTeamTest, ::testing::Values(1, 2, 5),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace weft::ops
