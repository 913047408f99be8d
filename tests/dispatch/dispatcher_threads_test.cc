// Clients on several threads, an engine thread and a reply thread use the
// dispatcher with the real clock, for ThreadSanitizer and the thread-safety
// analysis.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "src/base/threads/worker.h"
#include "src/dispatch/dispatcher.h"
#include "tests/dispatch/fake_engine_thread.h"

namespace weft::dispatch {
namespace {

constexpr int kClients = 4;
constexpr uint64_t kSteps = 60;
constexpr int kManagers = 2;
constexpr int kShortLives = 30;
// Fewer slots than adapters, so that adapters must move.
constexpr int kPlacesOnDevice = 3;

class DispatcherThreadsTest : public ::testing::Test {
 protected:
  DispatcherThreadsTest()
      : metrics_(&registry_),
        dispatcher_(Filled({.scheduler = {.max_batch_tokens = 30},
                            .residency = {.max_resident = kPlacesOnDevice,
                                          .host_bytes = 1 << 20}}),
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

  // Does what an engine does, without computing anything.
  void Compute() {
    std::vector<uint64_t> decoding;
    while (std::optional<Work> work = dispatcher_.Next(
               static_cast<int>(decoding.size()), absl::Hours(1))) {
      if (auto* tasks = std::get_if<RunTasks>(&*work)) {
        for (const EngineTask& task : tasks->tasks) task(absl::OkStatus());
      } else if (auto* train = std::get_if<RunTrain>(&*work)) {
        dispatcher_.steps().CountTokens(*train);
        for (const auto& [slice, step] : train->slices) {
          Count(step);
          Complete(step);
        }
      } else if (auto* step = std::get_if<RunStep>(&*work)) {
        // The step ends later, as if another thread wrote a checkpoint.
        Count(step->step);
        AfterIo([this, step = step->step] { Complete(step); });
      } else if (auto* move = std::get_if<RunMove>(&*work)) {
        AfterIo([this, move = move->move] { Finish(move); });
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

  // Runs `task` on the engine thread after a task of the I/O thread.
  void AfterIo(std::function<void()> task) {
    io_.Post([this, task = std::move(task), hold = dispatcher_.Hold()] {
      dispatcher_.Post([task](const absl::Status&) { task(); });
    });
  }

  void Finish(const Move& move) {
    AdapterDesk& desk = dispatcher_.adapters();
    if (desk.IsUnderway(move)) {
      ++moves_;
      desk.Publish(move.adapter,
                   {.info = {.location = move.to}, .image_bytes = 1});
    }
    desk.FinishMove(move, 1, absl::OkStatus());
  }

  // Counts the runs of steps of adapters that are never deleted ("a..."). Each
  // such step must run once.
  void Count(const StepTask& step) {
    if (AdapterIdOf(*step.request).starts_with("a")) ++runs_;
  }

  void Complete(const StepTask& step) {
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

  void Delete(const std::string& id) {
    dispatcher_.Post([this, id](const absl::Status&) {
      AdapterDesk& desk = dispatcher_.adapters();
      (void)desk.Remove(*desk.KeyOf(id));
    });
    while (dispatcher_.adapters().Info(id).ok()) std::this_thread::yield();
  }

  // Lists the adapters page by page. Checks their order and their number.
  void List() {
    std::vector<std::string> ids;
    ListAdaptersRequest request{.size = 2};
    AdapterPage page;
    do {
      page = *dispatcher_.adapters().List(request);
      for (const AdapterInfo& info : page.adapters) {
        ids.push_back(info.adapter_id);
      }
      if (page.more) request.after = ids.back();
    } while (page.more);
    EXPECT_TRUE(std::ranges::is_sorted(ids));
    EXPECT_LE(ids.size(), size_t{kClients + kManagers});
  }

  // Creates and deletes adapters, which may have work when they are deleted.
  void Manager(int number) {
    const std::string id = absl::StrCat("b", number);
    for (int life = 0; life < kShortLives; ++life) {
      Create(id);
      for (uint64_t step = 1; step <= 6; ++step) (void)Send(id, step);
      Send(id, 7).Cancel();
      Sample(id).Cancel();
      (void)Sample(id);
      List();
      Delete(id);
    }
  }

  CancelHandle Sample(const std::string& id) {
    ++calls_;
    return dispatcher_.samples().Submit(
        {.adapter_id = id, .prompt = {1}}, [](SampleDelta) {},
        [this](const absl::StatusOr<SampleResult>&) { ++answers_; });
  }

  // Sends every step twice, like a client whose connection breaks. Cancels and
  // samples in between.
  void Client(int number) {
    const std::string id = absl::StrCat("a", number);
    Create(id);
    for (uint64_t step = 1; step <= kSteps; ++step) {
      for (int time = 0; time < 2; ++time) (void)Send(id, step);
      const CancelHandle handle = Sample(id);
      if (step % 7 == 0) handle.Cancel();
    }
  }

  CancelHandle Send(const std::string& id, uint64_t step) {
    ++calls_;
    StepRequest request = OneDatum(id, step);
    WorkItem item = TrainItem();
    if (step % 5 == 0) {
      request = OptimStepRequest{.adapter_id = id, .step = step};
      item = {.kind = WorkKind::kOptim, .tokens = 1};
    }
    return dispatcher_.steps().Submit(
        std::move(request), std::move(item),
        [this, id](const absl::StatusOr<StepResultPtr>& result, bool) {
          if (result.ok() && id.starts_with("a")) ++successes_;
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
  std::atomic<int64_t> moves_ = 0;
  Dispatcher dispatcher_;
  Worker replies_;
  Worker io_;
  std::thread engine_;
};

TEST_F(DispatcherThreadsTest, AllCallsOfAllThreadsAreAnsweredOnce) {
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c)
    clients.emplace_back([&, c] { Client(c); });
  for (int m = 0; m < kManagers; ++m) {
    clients.emplace_back([&, m] { Manager(m); });
  }
  for (std::thread& client : clients) client.join();
  std::atomic<bool> drained = false;
  dispatcher_.Drain([&](const absl::StatusOr<bool>&) { drained = true; });
  while (!drained) std::this_thread::yield();
  EXPECT_EQ(answers_, calls_);
  EXPECT_EQ(successes_, 2 * kClients * static_cast<int64_t>(kSteps));
  EXPECT_EQ(runs_, kClients * static_cast<int64_t>(kSteps));
  EXPECT_GT(moves_, 0);
  EXPECT_EQ(dispatcher_.adapters().Count(), size_t{kClients});
}

TEST(DispatcherWaitTest, IdleComesWhenPatienceEnds) {
  const RealClock clock;
  prometheus::Registry registry;
  DispatchMetrics metrics(&registry);
  Dispatcher dispatcher(Filled({}), {.clock = &clock,
                                     .post_reply = [](std::function<void()>) {},
                                     .metrics = &metrics});
  const absl::Time start = clock.Now();
  const std::optional<Work> work = dispatcher.Next(0, absl::Milliseconds(20));
  ASSERT_TRUE(work.has_value());
  EXPECT_TRUE(std::holds_alternative<Idle>(*work));
  EXPECT_GE(clock.Now() - start, absl::Milliseconds(20));
}

// The batch of `a` waits for `b`, because both trained together before. No step
// of `b` comes.
TEST(BatchWindowTest, TheEngineThreadWakesWhenTheWaitOfABatchIsOver) {
  FakeEngineThread engine({.residency = {.max_resident = 2}});
  Dispatcher& dispatcher = engine.dispatcher();
  for (const char* adapter : {"a", "b"}) {
    engine.Create(adapter, "tenant", [](const absl::StatusOr<AdapterKey>&) {});
    (void)engine.Next();
  }
  engine.TrainTogether({"a", "b"});
  engine.Train("a", 2);
  ASSERT_TRUE(std::holds_alternative<Idle>(*engine.Next()));
  std::atomic<bool> woken = false;
  std::thread time([&] {
    while (!woken) {
      engine.clock().Advance(absl::Milliseconds(1));
      absl::SleepFor(absl::Milliseconds(1));
    }
  });
  const std::optional<Work> work =
      dispatcher.Next(/*active_samples=*/0, absl::Hours(1));
  woken = true;
  time.join();
  ASSERT_TRUE(work.has_value() && std::holds_alternative<RunTrain>(*work));
  const StepTask& step = std::get<RunTrain>(*work).slices.front().step;
  dispatcher.steps().Complete(step.id, TrainResult());
}

}  // namespace
}  // namespace weft::dispatch
