// Clients on several threads, an engine thread and a reply thread, with the
// real clock: what ThreadSanitizer and the thread-safety analysis look at.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "src/base/worker.h"
#include "src/dispatch/dispatcher.h"
#include "tests/dispatch/fake_engine_thread.h"

namespace weft::dispatch {
namespace {

constexpr int kClients = 4;
constexpr uint64_t kSteps = 60;

class DispatcherThreadsTest : public ::testing::Test {
 protected:
  DispatcherThreadsTest()
      : metrics_(&registry_),
        dispatcher_({.scheduler = {.max_batch_tokens = 30}},
                    {.clock = &clock_,
                     .post_reply =
                         [this](std::function<void()> task) {
                           replies_.Post(std::move(task));
                         },
                     .metrics = &metrics_}),
        engine_([this] { Compute(); }) {}

  ~DispatcherThreadsTest() override {
    dispatcher_.Stop();
    engine_.join();
    dispatcher_.Close(absl::UnavailableError("stopped"));
  }

  // What an engine does, without computing anything.
  void Compute() {
    std::vector<uint64_t> decoding;
    while (std::optional<Work> work = dispatcher_.Next(
               static_cast<int>(decoding.size()), absl::Hours(1))) {
      if (auto* tasks = std::get_if<RunTasks>(&*work)) {
        for (const EngineTask& task : tasks->tasks) task(absl::OkStatus());
      } else if (auto* train = std::get_if<RunTrain>(&*work)) {
        dispatcher_.steps().CountTokens(*train);
        for (const StepTask& step : train->steps) Complete(step);
      } else if (auto* step = std::get_if<RunStep>(&*work)) {
        // As a checkpoint: another thread writes the file.
        io_.Post([this, step = step->step, hold = dispatcher_.Hold()] {
          dispatcher_.Post(
              [this, step](const absl::Status&) { Complete(step); });
        });
      } else if (std::holds_alternative<RunDecode>(*work)) {
        Decode(decoding);
      } else if (auto* cancel = std::get_if<CancelSamples>(&*work)) {
        for (const uint64_t id : cancel->ids) {
          if (std::erase(decoding, id) > 0) {
            dispatcher_.samples().Finish(id, absl::CancelledError(""));
          }
        }
      }
    }
  }

  void Complete(const StepTask& step) {
    ++runs_;
    dispatcher_.steps().Complete(step.id, OptimStepResult{.step = step.step});
  }

  void Decode(std::vector<uint64_t>& decoding) {
    while (const std::optional<SampleTask> sample =
               dispatcher_.samples().Take()) {
      dispatcher_.samples().Start(*sample);
      decoding.push_back(sample->id);
    }
    for (const uint64_t id : std::exchange(decoding, {})) {
      dispatcher_.samples().Deliver(id, {SampleDelta()});
      dispatcher_.samples().Finish(id, SampleResult());
    }
  }

  void Create(const std::string& id) {
    dispatcher_.Post([this, id](const absl::Status&) {
      AdapterDesk& desk = dispatcher_.adapters();
      desk.WhenSlot([this, id](const absl::Status&) {
        AdapterDesk& owner = dispatcher_.adapters();
        owner.Add(owner.NewKey(), id, id, 0, {.image_bytes = 1});
      });
    });
    while (!dispatcher_.adapters().Info(id).ok()) std::this_thread::yield();
  }

  // Sends every step twice, as a client whose connection breaks, and cancels
  // and samples in between.
  void Client(int number) {
    const std::string id = absl::StrCat("a", number);
    Create(id);
    for (uint64_t step = 1; step <= kSteps; ++step) {
      for (int time = 0; time < 2; ++time) Send(id, step);
      SampleRequest request;
      request.adapter_id = id;
      request.prompt = {1};
      const CancelHandle handle = dispatcher_.samples().Submit(
          std::move(request), [](SampleDelta) {},
          [this](const absl::StatusOr<SampleResult>&) { ++answers_; });
      ++calls_;
      if (step % 7 == 0) handle.Cancel();
    }
  }

  void Send(const std::string& id, uint64_t step) {
    ++calls_;
    StepRequest request = OneDatum(id, step);
    sched::WorkItem item = TrainItem();
    if (step % 5 == 0) {
      request = OptimStepRequest{.adapter_id = id, .step = step};
      item = {.kind = sched::WorkKind::kOptim, .tokens = 1};
    }
    dispatcher_.steps().Submit(
        std::move(request), std::move(item),
        [this](const absl::StatusOr<StepResultPtr>& result, bool) {
          if (result.ok()) ++successes_;
          ++answers_;
        });
  }

  RealClock clock_;
  prometheus::Registry registry_;
  DispatchMetrics metrics_;
  std::atomic<int64_t> calls_ = 0;
  std::atomic<int64_t> answers_ = 0;
  std::atomic<int64_t> successes_ = 0;
  std::atomic<int64_t> runs_ = 0;
  Dispatcher dispatcher_;
  Worker replies_;
  Worker io_;
  std::thread engine_;
};

TEST_F(DispatcherThreadsTest, AllCallsOfAllThreadsAreAnsweredOnce) {
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c)
    clients.emplace_back([&, c] { Client(c); });
  for (std::thread& client : clients) client.join();
  std::atomic<bool> drained = false;
  dispatcher_.Drain([&](const absl::StatusOr<bool>&) { drained = true; });
  while (!drained) std::this_thread::yield();
  EXPECT_EQ(answers_, calls_);
  EXPECT_EQ(successes_, 2 * kClients * static_cast<int64_t>(kSteps));
  EXPECT_EQ(runs_, kClients * static_cast<int64_t>(kSteps));
  EXPECT_EQ(dispatcher_.adapters().Infos().size(), size_t{kClients});
}

TEST(DispatcherWaitTest, IdleComesWhenPatienceEnds) {
  const RealClock clock;
  prometheus::Registry registry;
  DispatchMetrics metrics(&registry);
  Dispatcher dispatcher(Options(), {.clock = &clock,
                                    .post_reply = [](std::function<void()>) {},
                                    .metrics = &metrics});
  const absl::Time start = clock.Now();
  const std::optional<Work> work = dispatcher.Next(0, absl::Milliseconds(20));
  ASSERT_TRUE(work.has_value());
  EXPECT_TRUE(std::holds_alternative<Idle>(*work));
  EXPECT_GE(clock.Now() - start, absl::Milliseconds(20));
}

}  // namespace
}  // namespace weft::dispatch
