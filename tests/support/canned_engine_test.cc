// Runs clients on several threads against the engine's threads, without gRPC,
// for ThreadSanitizer and the thread-safety analysis.
#include "tests/support/canned_engine.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

constexpr int kClients = 4;
constexpr uint64_t kRounds = 20;

class CannedEngineTest : public ::testing::Test {
 protected:
  // Counts the call now, and its answer later.
  template <typename Result>
  Callback<Result> Answered() {
    ++calls_;
    return [this](const absl::StatusOr<Result>&) { ++answers_; };
  }

  // Trains, samples and saves; every third sample is cancelled.
  void Client(int number) {
    const std::string id = absl::StrCat("a", number);
    std::atomic<bool> created = false;
    engine_.CreateAdapter({.adapter_id = id, .tenant = id},
                          [&](const absl::StatusOr<AdapterInfo>& info) {
                            EXPECT_TRUE(info.ok()) << info.status();
                            created = true;
                          });
    while (!created) std::this_thread::yield();
    for (uint64_t round = 0; round < kRounds; ++round) {
      TrainRequest train{.adapter_id = id, .step = 2 * round + 1};
      train.data = {Datum{.tokens = {1}, .targets = {2}}};
      engine_.Train(train, Answered<StepReply<TrainResult>>());
      engine_.OptimStep({.adapter_id = id, .step = 2 * round + 2},
                        Answered<StepReply<OptimStepResult>>());
      SampleRequest sample{.adapter_id = id, .prompt = {1}};
      sample.config.max_tokens = 3;
      const CancelHandle handle = engine_.Sample(
          sample, [](const SampleDelta&) {}, Answered<SampleResult>());
      if (round % 3 == 0) handle.Cancel();
      EXPECT_GT(engine_.last_heartbeat(), absl::UnixEpoch());
    }
    engine_.SaveCheckpoint({.adapter_id = id, .name = "end"},
                           Answered<StepReply<CheckpointInfo>>());
    engine_.LoadCheckpoint(
        {.adapter_id = id, .source_adapter_id = id, .name = "end"},
        Answered<StepReply<AdapterInfo>>());
  }

  std::atomic<int> calls_ = 0;
  std::atomic<int> answers_ = 0;
  CannedEngine engine_;
};

TEST_F(CannedEngineTest, AllCallsOfAllThreadsAreAnswered) {
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([this, c] { Client(c); });
  }
  for (std::thread& client : clients) client.join();
  std::atomic<bool> drained = false;
  engine_.Drain([&](const absl::StatusOr<bool>&) { drained = true; });
  while (!drained) std::this_thread::yield();
  EXPECT_EQ(answers_, calls_);
  EXPECT_EQ(engine_.num_waiting(), 0U);
  for (int c = 0; c < kClients; ++c) {
    engine_.GetAdapter(absl::StrCat("a", c),
                       [](const absl::StatusOr<AdapterInfo>& info) {
                         ASSERT_TRUE(info.ok()) << info.status();
                         EXPECT_EQ(info->optim_steps, kRounds);
                         EXPECT_EQ(info->last_step, 2 * kRounds);
                       });
  }
}

}  // namespace
}  // namespace weft
