// Uses the client's calls and step numbers from several threads, without a
// connection, for ThreadSanitizer.
#include <atomic>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "client/step_counter.h"
#include "client/unary_call.h"
#include "gtest/gtest.h"
#include "src/base/threads/worker.h"
#include "weft/v1/server.pb.h"

namespace weft::client {
namespace {

constexpr int kThreads = 4;
constexpr int kRounds = 100;
constexpr int kNumbersPerThread = 1000;

TEST(StepCounterThreadsTest, EveryNumberIsGivenOutOnce) {
  StepCounter counter(0);
  std::atomic<uint64_t> sum = 0;
  std::latch start(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      start.arrive_and_wait();
      for (int round = 0; round < kNumbersPerThread; ++round) {
        const uint64_t number = counter.Take()->step;
        counter.SetCancel(number, [] {});
        // Lets another thread run before this one takes the lock again.
        std::this_thread::yield();
        sum += number;
        EXPECT_TRUE(counter.Finish(number, StepOutcome::kDone, {}).ok());
        (void)counter.CheckIdle();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  constexpr uint64_t kNumbers = kThreads * kNumbersPerThread;
  EXPECT_EQ(sum, kNumbers * (kNumbers + 1) / 2);
  EXPECT_EQ(counter.next_step(), kNumbers + 1);
  EXPECT_TRUE(counter.CheckIdle().ok());
}

// Retries are off, because they would start on gRPC's threads.
TEST(UnaryCallThreadsTest, ACallMayBeCancelledWhileItStarts) {
  using Call = UnaryCall<v1::GetInfoRequest, v1::GetInfoResponse>;
  std::atomic<int> ended = 0;
  Worker wire;
  for (int round = 0; round < kRounds; ++round) {
    const auto call = std::make_shared<Call>(
        [&wire](grpc::ClientContext*, const v1::GetInfoRequest*,
                v1::GetInfoResponse* response, auto done) {
          wire.Post([response, done] {
            response->mutable_info()->set_num_adapters(1);
            done(grpc::Status::OK);
          });
        },
        v1::GetInfoRequest(),
        CallOptions{.timeout = absl::Seconds(10), .retry = {.max_attempts = 1}},
        [&ended](const absl::StatusOr<Reply<v1::GetInfoResponse>>& reply) {
          EXPECT_EQ(reply.value().message.info().num_adapters(), 1U);
          ++ended;
        });
    std::thread starter([call] { call->Start(); });
    std::thread canceller([call] { call->Cancel(); });
    starter.join();
    canceller.join();
  }
  while (ended < kRounds) std::this_thread::yield();
}

}  // namespace
}  // namespace weft::client
