// Tests work that waits because the store of --state does not answer: for the
// tensors of its adapter, or for those of its teacher.
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/dispatch/fake_engine_thread.h"

namespace weft::dispatch {
namespace {

using ::testing::ElementsAre;

class StoreOutageTest : public ::testing::Test {
 protected:
  Dispatcher& dispatcher() { return engine_.dispatcher(); }
  AdapterDesk& adapters() { return dispatcher().adapters(); }

  void Create(const std::string& id) {
    engine_.Create(id, "tenant", [](const absl::StatusOr<AdapterKey>& key) {
      ASSERT_TRUE(key.ok()) << key.status();
    });
    (void)engine_.Next();
  }
  AdapterKey KeyOf(const std::string& id) { return *adapters().KeyOf(id); }

  void Train(const std::string& id, uint64_t step) {
    (void)dispatcher().steps().Submit(
        OneDatum(id, step), TrainItem(),
        [this](const absl::StatusOr<StepResultPtr>& result, bool) {
          ends_.push_back(result.status().code());
        });
  }
  // Returns the next work if it is a batch.
  std::optional<RunTrain> NextBatch() {
    std::optional<Work> work = engine_.Next();
    auto* const train = work ? std::get_if<RunTrain>(&*work) : nullptr;
    return train == nullptr ? std::nullopt : std::optional(std::move(*train));
  }
  static std::vector<uint64_t> StepsOf(const std::optional<RunTrain>& train) {
    std::vector<uint64_t> steps;
    for (const StepSlice& slice : train.value_or(RunTrain()).slices) {
      steps.push_back(slice.step.step);
    }
    return steps;
  }
  void End(const RunTrain& train) {
    for (const StepSlice& slice : train.slices) {
      dispatcher().steps().Complete(slice.step.id, TrainResult());
    }
    engine_.RunReplies();
  }

  FakeEngineThread engine_{{.residency = {.max_resident = 2},
                            .max_adapters = 3,
                            .max_adapters_per_tenant = 3}};
  std::vector<absl::StatusCode> ends_;
};

TEST_F(StoreOutageTest, StepsOfAnAdapterThatCannotComeWait) {
  Create("near");
  const AdapterKey far{100};
  AdapterHistory history;
  history.info = {.adapter_id = "far", .tenant = "tenant", .next_step = 1};
  dispatcher().recovery().AddOnDisk(
      far, history, {.info = {.location = AdapterLocation::kDisk}});
  Train("far", 1);
  Train("far", 2);
  std::optional<Work> work = engine_.Next();
  ASSERT_TRUE(work && std::holds_alternative<RunMove>(*work));
  adapters().PostponeMove(std::get<RunMove>(*work).move);
  Train("near", 1);
  const std::optional<RunTrain> near = NextBatch();
  ASSERT_THAT(StepsOf(near), ElementsAre(1));
  End(*near);
  EXPECT_FALSE(NextBatch().has_value());
  EXPECT_THAT(ends_, ElementsAre(absl::StatusCode::kOk));

  adapters().ResumeMove(far);
  work = engine_.Next();
  ASSERT_TRUE(work && std::holds_alternative<RunMove>(*work));
  engine_.Finish(std::get<RunMove>(*work).move, absl::OkStatus());
  const std::optional<RunTrain> both = NextBatch();
  ASSERT_THAT(StepsOf(both), ElementsAre(1, 2));
  End(*both);
  EXPECT_THAT(ends_, ElementsAre(absl::StatusCode::kOk, absl::StatusCode::kOk,
                                 absl::StatusCode::kOk));
}

TEST_F(StoreOutageTest, AStepThatWaitsForItsTeacherKeepsTheOrder) {
  Create("a");
  Create("b");
  Train("a", 1);
  const std::optional<RunTrain> waits = NextBatch();
  ASSERT_THAT(StepsOf(waits), ElementsAre(1));
  Train("a", 2);
  EXPECT_FALSE(NextBatch().has_value());
  Train("b", 1);
  const std::optional<RunTrain> other = NextBatch();
  ASSERT_THAT(StepsOf(other), ElementsAre(1));
  End(*other);
  dispatcher().steps().RunLater(*waits);
  const std::optional<RunTrain> first = NextBatch();
  ASSERT_THAT(StepsOf(first), ElementsAre(1));
  EXPECT_EQ(first->slices[0].step.adapter, KeyOf("a"));
  EXPECT_TRUE(first->backward);
  End(*first);
  EXPECT_THAT(StepsOf(NextBatch()), ElementsAre(2));
}

TEST_F(StoreOutageTest, AStepThatHasEndedMeanwhileDoesNotRun) {
  Create("a");
  Train("a", 1);
  const std::optional<RunTrain> waits = NextBatch();
  End(*waits);
  dispatcher().steps().RunLater(*waits);
  EXPECT_FALSE(NextBatch().has_value());
}

}  // namespace
}  // namespace weft::dispatch
