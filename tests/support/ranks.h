// Runs several ranks as threads of one process.
#ifndef WEFT_TESTS_SUPPORT_RANKS_H_
#define WEFT_TESTS_SUPPORT_RANKS_H_

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <barrier>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "src/parallel/communicator.h"

namespace weft {

// Runs `body` on `size` threads that form a group. Each rank computes with one
// thread. An exception fails the test.
inline void RunRanks(int size,
                     const std::function<void(parallel::Communicator&)>& body) {
  const std::shared_ptr<parallel::Rendezvous> meeting =
      parallel::Rendezvous::InProcess();
  // All ranks join before a body runs. Otherwise, a body that ends at once
  // would close connections that other ranks are still making.
  std::barrier joined(size);
  const auto run = [&](int rank) {
    bool waits = true;
    try {
      const auto group = parallel::Communicator::Join(
          meeting, {.name = "test",
                    .shard = {.rank = rank, .size = size},
                    .timeout = absl::Seconds(60)});
      joined.arrive_and_wait();
      waits = false;
      body(*group);
    } catch (const std::exception& error) {
      if (waits) joined.arrive_and_drop();
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&run, rank] {
      at::set_num_threads(1);
      run(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_RANKS_H_
