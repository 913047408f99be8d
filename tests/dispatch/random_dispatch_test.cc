// Random clients use the dispatcher: repeated, lost, late and cancelled calls,
// steps out of order and in slices, deletions and new adapters under old names,
// failing work and moves, one or two slots on the device. In all cases every
// call is answered once, every step ends once and not across a barrier, and its
// effect belongs to the adapter to which the step was sent.
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/dispatch/fake_engine_thread.h"

namespace weft::dispatch {
namespace {

constexpr int kNames = 3;

class TrainWorld {
 public:
  TrainWorld(uint64_t seed, int slots, int64_t reply_bytes)
      : random_(seed),
        slots_(slots),
        engine_({.scheduler = {.max_batch_tokens = 25},
                 .residency = {.max_resident = slots},
                 .max_stored_reply_bytes = reply_bytes}) {}

  void Run() {
    for (int round = 0; round < 1000; ++round) {
      Disturb();
      Work();
      engine_.RunReplies();
      if (testing::Test::HasFailure()) return;
    }
    // Without new calls, all calls and moves must end. None may wait forever.
    quiet_ = true;
    for (int round = 0; round < 1000; ++round) {
      engine_.clock().Advance(absl::Seconds(1));
      Work();
      engine_.RunReplies();
    }
    for (const Call& call : calls_) {
      ASSERT_EQ(call.answers, 1) << call.adapter << " step " << call.step;
    }
    EXPECT_TRUE(steps_.empty() && samples_.empty() && moves_.empty());
    const Activity activity =
        engine_.dispatcher().adapters().Watch({.tenants = {"tenant"}});
    EXPECT_EQ(activity.tenants[0].queued_requests, 0);
  }

 private:
  struct Call {
    std::string adapter;
    uint64_t step = 0;
    int answers = 0;
    CancelHandle handle;
  };
  // The key of an adapter, and the number of a step that it ran.
  using Effect = std::pair<AdapterKey, uint64_t>;

  int Uniform(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random_);
  }
  std::string AnyName() { return "a" + std::to_string(Uniform(1, kNames)); }

  void Disturb() {
    const int what = Uniform(0, 99);
    if (what < 8) {
      Create(AnyName());
    } else if (what < 10) {
      const auto key = engine_.dispatcher().adapters().KeyOf(AnyName());
      if (key) Remove(*key);
    } else if (what < 60) {
      Send(AnyName());
    } else if (what < 75) {
      Sample();
    } else if (what < 80 && !calls_.empty()) {
      calls_[static_cast<size_t>(
                 Uniform(0, static_cast<int>(calls_.size()) - 1))]
          .handle.Cancel();
    } else {
      engine_.clock().Advance(absl::Milliseconds(Uniform(1, 900)));
    }
  }

  void Create(const std::string& name) {
    engine_.Create(name, "tenant", [this](absl::StatusOr<AdapterKey> key) {
      if (!key.ok()) return;
      EXPECT_TRUE(keys_.insert(*key).second) << "a key was given out twice";
    });
  }

  void Remove(AdapterKey key) {
    for (const uint64_t id : engine_.dispatcher().adapters().Remove(key)) {
      std::erase_if(steps_,
                    [id](const StepTask& step) { return step.id == id; });
    }
  }

  static bool IsBarrier(uint64_t step) { return step % 3 == 0; }

  // Sends the next step, repeats one of the last, or leaves a gap.
  void Send(const std::string& name) {
    const auto key = engine_.dispatcher().adapters().KeyOf(name);
    const int next = key ? static_cast<int>(ended_[*key].size()) + 1 : 1;
    const auto step = static_cast<uint64_t>(std::max(1, next + Uniform(-2, 4)));
    const size_t index = NewCall(name, step);
    const bool train = !IsBarrier(step);
    WorkItem item = TrainItem();
    item.datum_tokens.resize(static_cast<size_t>(Uniform(1, 4)), 10);
    StepRequest request = OneDatum(name, step);
    if (!train) {
      request = OptimStepRequest{.adapter_id = name, .step = step};
    }
    std::visit(
        [&](auto& r) {
          if (Uniform(0, 3) == 0) {
            r.deadline = engine_.clock().Now() + absl::Seconds(Uniform(1, 9));
          } else {
            r.deadline = engine_.clock().Now() + absl::Seconds(60);
          }
        },
        request);
    calls_[index].handle = engine_.dispatcher().steps().Submit(
        std::move(request),
        train ? item : WorkItem{.kind = WorkKind::kOptim, .tokens = 1},
        [this, index](const absl::StatusOr<StepResultPtr>& result, bool) {
          Call& call = calls_[index];
          ++call.answers;
          if (!result.ok() || std::holds_alternative<StepFailure>(**result)) {
            return;
          }
          // The effect has this step's number, and its adapter had this name.
          const uint64_t serial = std::get<OptimStepResult>(**result).version;
          EXPECT_EQ(effects_.at(serial).second, call.step);
          EXPECT_EQ(names_.at(effects_.at(serial).first), call.adapter);
        });
  }

  void Sample() {
    const std::string name = Uniform(0, 2) == 0 ? "" : AnyName();
    const size_t index = NewCall(name, 0);
    SampleRequest request;
    request.adapter_id = name;
    request.prompt = {1};
    request.deadline = engine_.clock().Now() + absl::Seconds(30);
    calls_[index].handle = engine_.dispatcher().samples().Submit(
        std::move(request), nullptr,
        [this, index](const absl::StatusOr<SampleResult>&) {
          ++calls_[index].answers;
        });
  }

  size_t NewCall(const std::string& adapter, uint64_t step) {
    calls_.push_back({.adapter = adapter, .step = step});
    return calls_.size() - 1;
  }

  void Work() {
    EndSomething();
    const std::optional<weft::dispatch::Work> work =
        engine_.Next(static_cast<int>(samples_.size()));
    ASSERT_TRUE(work.has_value());
    CheckSlots();
    if (const auto* move = std::get_if<RunMove>(&*work)) {
      moves_.push_back(move->move);
    } else if (const auto* step = std::get_if<RunStep>(&*work)) {
      ExpectInOrder(step->step);
      const StepRequest& request = *step->step.request;
      if (const auto* refused = std::get_if<RefusedStep>(&request)) {
        End(step->step, refused->status);
      } else {
        steps_.push_back(step->step);
      }
    } else if (const auto* train = std::get_if<RunTrain>(&*work)) {
      RunSlices(*train);
    } else if (const auto* cancel = std::get_if<CancelSamples>(&*work)) {
      for (const uint64_t id : cancel->ids) {
        if (samples_.erase(id) > 0) {
          engine_.dispatcher().samples().Finish(id, absl::CancelledError(""));
        }
      }
    } else if (std::holds_alternative<RunDecode>(*work)) {
      Decode();
    }
  }

  void RunSlices(const RunTrain& train) {
    for (const auto& [slice, task] : train.slices) ExpectInOrder(task);
    std::vector<StepSlice> slices = train.slices;
    std::ranges::shuffle(slices, random_);
    for (const auto& [slice, task] : slices) {
      int64_t& done = data_done_[task.id];
      EXPECT_EQ(done, slice.first_datum) << "data lost or repeated";
      done += slice.num_data;
      if (slice.last) {
        Complete(task);
      } else if (Uniform(0, 6) == 0) {
        End(task, absl::InternalError("failed"));
      } else {
        EXPECT_TRUE(engine_.dispatcher().steps().FinishSlice(task.id));
      }
    }
  }

  // Expects that all steps below the latest barrier have ended, with it; below
  // a barrier, all earlier steps.
  void ExpectInOrder(const StepTask& task) {
    bool behind_barrier = IsBarrier(task.step);
    for (uint64_t step = task.step - 1; step > 0; --step) {
      behind_barrier |= IsBarrier(step);
      EXPECT_TRUE(!behind_barrier || ended_[task.adapter].contains(step))
          << "step " << task.step << " before " << step;
    }
  }

  // Checks that the slots suffice for the adapters that are on the device or on
  // their way there.
  void CheckSlots() {
    int64_t used = 0;
    const AdapterPage all = *engine_.dispatcher().adapters().List({});
    EXPECT_FALSE(all.more);
    for (const AdapterInfo& info : all.adapters) {
      if (info.location == AdapterLocation::kDevice) ++used;
    }
    for (const Move& move : moves_) {
      if (move.to == AdapterLocation::kDevice &&
          engine_.dispatcher().adapters().IsUnderway(move)) {
        ++used;
      }
    }
    EXPECT_LE(used, slots_);
  }

  // Ends a step or a move some time after its start, as if another thread had
  // reported its end.
  void EndSomething() {
    if (!steps_.empty() && (quiet_ || Uniform(0, 1) == 0)) {
      const StepTask step = steps_.front();
      steps_.erase(steps_.begin());
      Complete(step);
    }
    if (!moves_.empty() && (quiet_ || Uniform(0, 1) == 0)) {
      const Move move = moves_.front();
      moves_.erase(moves_.begin());
      engine_.Finish(move, quiet_ || Uniform(0, 5) > 0
                               ? absl::OkStatus()
                               : absl::ResourceExhaustedError("full"));
    }
  }

  void Complete(const StepTask& step) {
    if (Uniform(0, 6) == 0) {
      End(step, absl::InternalError("failed"));
      return;
    }
    names_[step.adapter] = AdapterIdOf(*step.request);
    effects_[++serial_] = {step.adapter, step.step};
    End(step, OptimStepResult{.version = serial_});
  }

  void End(const StepTask& step, absl::StatusOr<StepResult> result) {
    EXPECT_TRUE(ended_[step.adapter].insert(step.step).second)
        << AdapterIdOf(*step.request) << " step " << step.step << " ran twice";
    engine_.dispatcher().steps().Complete(step.id, std::move(result));
  }

  void Decode() {
    SampleDesk& desk = engine_.dispatcher().samples();
    if (const std::optional<SampleTask> sample = desk.Take()) {
      if (samples_.size() > 2) {
        desk.PutBack(*sample);
      } else {
        desk.Start(*sample);
        samples_.insert(sample->id);
      }
    }
    if (!samples_.empty()) {
      desk.Finish(*samples_.begin(), SampleResult());
      samples_.erase(samples_.begin());
    }
  }

  std::mt19937_64 random_;
  const int slots_;
  FakeEngineThread engine_;
  bool quiet_ = false;
  std::vector<Call> calls_;
  std::set<AdapterKey> keys_;
  std::map<AdapterKey, std::string> names_;
  std::map<AdapterKey, std::set<uint64_t>> ended_;
  std::map<uint64_t, int64_t> data_done_;  // By the id of the step.
  std::map<uint64_t, Effect> effects_;     // Keys: serial numbers.
  uint64_t serial_ = 0;
  std::vector<StepTask> steps_;  // Steps that are running.
  std::set<uint64_t> samples_;   // Samples that are being decoded.
  std::vector<Move> moves_;
};

TEST(RandomDispatchTest, EveryCallIsAnsweredOnceAndEveryStepRunsOnce) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    for (const int slots : {1, 2, 8}) {
      SCOPED_TRACE(testing::Message()
                   << "seed " << seed << ", slots " << slots);
      TrainWorld(seed, slots, /*reply_bytes=*/seed % 2 == 0 ? 2000 : 1 << 20)
          .Run();
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace weft::dispatch
