// Runs several ranks as threads of one process.
#ifndef WEFT_TESTS_SUPPORT_RANKS_H_
#define WEFT_TESTS_SUPPORT_RANKS_H_

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "src/parallel/communicator.h"

namespace weft::testing {

// Runs `body` on `size` threads that form a group. Each computes on one thread.
// An exception fails the test.
inline void RunRanks(int size,
                     const std::function<void(parallel::Communicator&)>& body) {
  const std::shared_ptr<parallel::Rendezvous> meeting =
      parallel::Rendezvous::InProcess();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      try {
        const auto group = parallel::Communicator::Join(
            meeting, {.name = "test",
                      .shard = {.rank = rank, .size = size},
                      .timeout = absl::Seconds(60)});
        body(*group);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_RANKS_H_
