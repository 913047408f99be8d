#include "src/parallel/communicator.h"

#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/ranks.h"

namespace weft::parallel {
namespace {

at::Tensor Noise(int rank, int64_t size) {
  return at::arange(size, at::kFloat).add_(rank).sin_();
}

// Sums tensors of `size` numbers on `num_ranks` ranks.
void ExpectEqualSums(int num_ranks, int64_t size) {
  std::mutex mutex;
  std::vector<at::Tensor> sums;
  RunRanks(num_ranks, [&](Communicator& group) {
    at::Tensor sum = Noise(group.shard().rank, size);
    group.AllReduce(sum);
    const std::lock_guard lock(mutex);
    sums.push_back(sum);
  });
  ASSERT_EQ(std::ssize(sums), num_ranks);
  at::Tensor exact = at::zeros({size}, at::kDouble);
  for (int rank = 0; rank < num_ranks; ++rank) exact += Noise(rank, size);
  for (const at::Tensor& sum : sums) {
    EXPECT_TRUE(at::allclose(sum.to(at::kDouble), exact, 0, 1e-6));
    EXPECT_TRUE(at::equal(sum, sums[0]));
  }
}

TEST(CommunicatorTest, SumsAreTheSameBitsOnAllRanks) {
  for (const int num_ranks : {2, 3, 4, 8}) ExpectEqualSums(num_ranks, 1000);
  ExpectEqualSums(4, 100'000);  // So large that pairs do not sum it.
}

TEST(CommunicatorTest, GathersInTheOrderOfRanks) {
  RunRanks(4, [](Communicator& group) {
    const at::Tensor own = at::full({2, 3}, group.shard().rank, at::kLong);
    const at::Tensor all = group.AllGather(own);
    ASSERT_EQ(all.sizes(), (std::vector<int64_t>{4, 2, 3}));
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_TRUE(at::equal(all[rank], at::full({2, 3}, rank, at::kLong)));
    }
  });
}

TEST(CommunicatorTest, BroadcastsAndSends) {
  RunRanks(3, [](Communicator& group) {
    const int rank = group.shard().rank;
    at::Tensor bytes = at::full({5}, rank + 7, at::kByte);
    group.Broadcast(bytes);
    EXPECT_TRUE(at::equal(bytes, at::full({5}, 7, at::kByte)));
    if (rank == 0) {
      at::Tensor got = at::empty({4}, at::kFloat);
      group.Receive(got, 2);
      EXPECT_TRUE(at::equal(got, at::full({4}, 2.5f)));
    } else if (rank == 2) {
      group.Send(at::full({4}, 2.5f), 0);
    }
  });
}

TEST(CommunicatorTest, ARankThatIsGoneMakesTheOthersThrow) {
  RunRanks(2, [](Communicator& group) {
    at::Tensor tensor = at::ones({8});
    group.AllReduce(tensor);  // Both ranks are alive up to here.
    if (group.shard().rank == 1) return;
    EXPECT_THROW(group.AllReduce(tensor), std::exception);
  });
}

// Returns a socket that listens on a free port of loopback, and the port.
std::pair<int, int> ListenAnywhere() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{.sin_family = AF_INET,
                      .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof(address);
  auto* name = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(fd, name, size), 0);
  EXPECT_EQ(listen(fd, 8), 0);
  EXPECT_EQ(getsockname(fd, name, &size), 0);
  return {fd, ntohs(address.sin_port)};
}

TEST(CommunicatorTest, RanksMeetOverTcp) {
  const auto [fd, port] = ListenAnywhere();
  const auto join = [&, fd = fd, port = port](int rank) {
    const auto meeting =
        Rendezvous::Tcp("127.0.0.1", port, /*serve=*/rank == 0,
                        rank == 0 ? fd : -1, absl::Seconds(20));
    const auto group = Communicator::Join(
        meeting, {.name = "tcp", .shard = {.rank = rank, .size = 2}});
    at::Tensor sum = at::full({3}, rank + 1.0f);
    group->AllReduce(sum);
    EXPECT_TRUE(at::equal(sum, at::full({3}, 3.0f)));
    // Rank 0 has the store, so it leaves last.
    group->Broadcast(sum);
  };
  std::thread other([&] { join(1); });
  join(0);
  other.join();
}

}  // namespace
}  // namespace weft::parallel
