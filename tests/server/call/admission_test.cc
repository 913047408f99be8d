// Clients with all their steps under way use a server whose memory is too small
// for them. They retry as errors.proto says: a refused call goes again when its
// hint has passed, in no special order. Connections break, and replies get
// lost. In all cases every step is done, only once, and no step that could run
// next is refused while the engine has no work: steps that wait for others
// never hold the memory that those need.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/http/fair_budget.h"
#include "src/base/reason.h"
#include "tests/dispatch/fake_engine_thread.h"
#include "tests/support/sanitizer_slowdown.h"

namespace weft::server {
namespace {

using dispatch::FakeEngineThread;
using dispatch::Idle;
using dispatch::OneDatum;
using dispatch::RunMove;
using dispatch::RunStep;
using dispatch::RunTrain;
using dispatch::TrainItem;

constexpr absl::Duration kHint = absl::Seconds(1);
constexpr double kJitter = 0.2;
constexpr absl::Duration kReconnect = absl::Milliseconds(200);

class AdmissionWorld {
 public:
  // There is memory for `limit` of the largest requests.
  AdmissionWorld(uint64_t seed, int limit)
      : random_(seed),
        engine_({.scheduler = {.max_batch_tokens = 25},
                 .residency = {.max_resident = Uniform(1, 5)}}),
        memory_(std::make_shared<FairBudget>(limit * kMostBytes, "bytes")) {
    const int num_adapters = Uniform(1, 5);
    const int num_tenants = Uniform(1, num_adapters);
    for (int a = 0; a < num_adapters; ++a) {
      const std::string name = "a" + std::to_string(a);
      const std::string tenant = "t" + std::to_string(a % num_tenants);
      engine_.Create(name, tenant, [](const absl::StatusOr<AdapterKey>& key) {
        ASSERT_TRUE(key.ok()) << key.status();
      });
      const int num_steps = Uniform(1, 50);
      for (int step = 1; step <= num_steps; ++step) {
        calls_.push_back({.tenant = tenant,
                          .adapter = name,
                          .step = step,
                          .bytes = Uniform(1, kMostBytes)});
      }
      // Forwards without a number, which wait for no step.
      for (int i = Uniform(0, 3); i > 0; --i) {
        calls_.push_back(
            {.tenant = tenant, .adapter = name, .step = 0, .bytes = 1});
      }
    }
    for (Call& call : calls_) call.due = engine_.clock().Now();
  }

  void Run() {
    while (Work()) {  // Makes the adapters.
    }
    const absl::Time start = engine_.clock().Now();
    while (!Done() && !testing::Test::HasFailure()) {
      SendWhatIsDue();
      Disturb();
      bool idle = false;
      for (int i = Uniform(0, 4); i > 0 && !idle; --i) idle = !Work();
      engine_.RunReplies();
      ASSERT_TRUE(!idle || NextDue() || Done()) << "all calls wait for nothing";
      engine_.clock().Advance(idle && NextDue()
                                  ? std::max(absl::ZeroDuration(),
                                             *NextDue() - engine_.clock().Now())
                                  : absl::Milliseconds(Uniform(0, 30)));
    }
    // Each time that all calls have retried, at least one step was done.
    EXPECT_LE(engine_.clock().Now() - start,
              (kHint * (1 + kJitter) + absl::Milliseconds(100)) *
                  static_cast<double>(calls_.size() + broken_));
  }

 private:
  static constexpr int kMostBytes = 100;

  struct Call {
    std::string tenant;
    std::string adapter;
    int step = 0;
    int bytes = 0;
    bool done = false;
    bool lost = false;              // The next reply gets lost.
    std::optional<absl::Time> due;  // When to send; none while under way.
    CancelHandle handle = {};
  };

  int Uniform(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random_);
  }

  bool Done() const {
    return std::ranges::all_of(calls_, [](const Call& c) { return c.done; });
  }

  std::optional<absl::Time> NextDue() const {
    std::optional<absl::Time> next;
    for (const Call& call : calls_) {
      if (call.due && (!next || *call.due < *next)) next = call.due;
    }
    return next;
  }

  // Returns whether all lower steps of the call's adapter are done.
  bool IsNext(const Call& call) const {
    return std::ranges::none_of(calls_, [this, &call](const Call& other) {
      return other.adapter == call.adapter && other.step > 0 &&
             other.step < call.step && !applied_.contains(Name(other));
    });
  }

  static std::pair<std::string, int> Name(const Call& call) {
    return {call.adapter, call.step};
  }

  void SendWhatIsDue() {
    std::vector<size_t> due;
    for (size_t i = 0; i < calls_.size(); ++i) {
      if (calls_[i].due && *calls_[i].due <= engine_.clock().Now()) {
        due.push_back(i);
      }
    }
    std::shuffle(due.begin(), due.end(), random_);
    for (const size_t i : due) {
      Send(i);
      if (Uniform(0, 3) == 0) Work();
      engine_.RunReplies();
    }
  }

  void Send(size_t index) {
    Call& call = calls_[index];
    call.due.reset();
    dispatch::WorkItem item = TrainItem();
    if (call.step == 0) {
      item.backward = false;
      item.unnumbered = true;
    } else if (call.step % 3 == 0) {
      item = {.kind = dispatch::WorkKind::kOptim, .tokens = 10};
    }
    TrainRequest request =
        OneDatum(call.adapter, static_cast<uint64_t>(call.step));
    request.unnumbered = call.step == 0;
    const absl::Status charged = Charge(call, &request);
    if (!charged.ok()) return Answer(call, charged);
    call.handle = engine_.dispatcher().steps().Submit(
        std::move(request), std::move(item),
        [this, index](const absl::StatusOr<StepResultPtr>& result, bool) {
          Answer(calls_[index], result.status());
        });
  }

  // Does what the server does before it submits a step (server/call.h).
  absl::Status Charge(const Call& call, TrainRequest* request) {
    const uint64_t ahead = engine_.dispatcher().adapters().Ahead(
        call.adapter, static_cast<uint64_t>(call.step));
    auto charge = memory_->ReserveRequest(call.tenant, call.bytes, /*beside=*/0,
                                          call.step == 0 ? 0 : ahead);
    if (charge.ok()) request->charge = *std::move(charge);
    return charge.status();
  }

  void Answer(Call& call, const absl::Status& status) {
    const absl::Time now = engine_.clock().Now();
    if (status.ok() && !std::exchange(call.lost, false)) {
      EXPECT_TRUE(call.step == 0 || applied_.contains(Name(call)));
      call.done = true;
      return;
    }
    if (absl::IsResourceExhausted(status)) {
      EXPECT_EQ(FindReason(status).value_or(Reason()).name, "SHARE_IN_USE");
      // If nothing else keeps the step from running, the engine is busy.
      if (IsNext(call)) {
        EXPECT_TRUE(Work()) << call.adapter << " step " << call.step;
      }
      call.due = now + kHint * std::uniform_real_distribution<double>(
                                   1, 1 + kJitter)(random_);
      return;
    }
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
    call.due = now + kReconnect;
  }

  // Breaks a call's connection, or loses its reply.
  void Disturb() {
    if (Uniform(0, 9) > 0) return;
    Call& call = calls_[static_cast<size_t>(
        Uniform(0, static_cast<int>(calls_.size()) - 1))];
    if (call.done || call.due) return;
    ++broken_;
    if (Uniform(0, 1) == 0) {
      call.lost = true;
    } else {
      call.handle.Cancel();
    }
  }

  // Does what the engine does next, to its end. Returns false if it is idle.
  bool Work() {
    const std::optional<dispatch::Work> work = engine_.Next();
    EXPECT_TRUE(work.has_value());
    if (const auto* move = std::get_if<RunMove>(&*work)) {
      engine_.Finish(move->move, absl::OkStatus());
    } else if (const auto* step = std::get_if<RunStep>(&*work)) {
      Complete(step->step);
    } else if (const auto* train = std::get_if<RunTrain>(&*work)) {
      for (const auto& [slice, task] : train->slices) Complete(task);
    } else {
      EXPECT_TRUE(std::holds_alternative<Idle>(*work));
      return false;
    }
    return true;
  }

  void Complete(const StepTask& task) {
    const std::pair<std::string, int> name = {AdapterIdOf(*task.request),
                                              static_cast<int>(task.step)};
    EXPECT_TRUE(applied_.insert(name).second || task.step == 0)
        << name.first << " step " << name.second << " ran twice";
    engine_.dispatcher().steps().Complete(task.id, OptimStepResult{});
  }

  std::mt19937_64 random_;
  FakeEngineThread engine_;
  const std::shared_ptr<FairBudget> memory_;
  std::vector<Call> calls_;
  std::set<std::pair<std::string, int>> applied_;  // Steps that have run.
  int broken_ = 0;
};

TEST(AdmissionTest, NoStepIsLostOrWaitsWhileTheEngineIsIdle) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    for (int limit = 4; limit <= 20; limit += kSanitizerSlowdown) {
      SCOPED_TRACE(testing::Message()
                   << "seed " << seed << ", limit " << limit);
      AdmissionWorld(seed, limit).Run();
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace weft::server
