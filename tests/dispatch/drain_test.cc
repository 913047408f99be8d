// Tests what a drain takes, and how it is taken back.
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "tests/dispatch/fake_engine_thread.h"

namespace weft::dispatch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

class DrainTest : public ::testing::Test {
 protected:
  DrainTest() {
    engine_.Create("a", "tenant", [](const absl::StatusOr<AdapterKey>&) {});
    (void)engine_.Next();
    dispatcher().Drain([this](const absl::StatusOr<bool>& drained) {
      drains_.push_back(drained.status().code());
    });
  }

  Dispatcher& dispatcher() { return engine_.dispatcher(); }

  // Returns the status of a step that ends at once; none if it was accepted.
  std::optional<absl::StatusCode> Submit(StepRequest request, WorkItem item) {
    const auto code = std::make_shared<std::optional<absl::StatusCode>>();
    (void)dispatcher().steps().Submit(
        std::move(request), std::move(item),
        [code](const absl::StatusOr<StepResultPtr>& result, bool) {
          *code = result.status().code();
        });
    engine_.RunReplies();
    return *code;
  }
  std::optional<absl::StatusCode> Train(uint64_t step) {
    return Submit(OneDatum("a", step), TrainItem());
  }
  std::optional<absl::StatusCode> Save(uint64_t step) {
    SaveCheckpointRequest request;
    request.adapter_id = "a";
    request.step = step;
    return Submit(std::move(request),
                  {.kind = WorkKind::kAdapterOp, .tokens = 1});
  }
  // Runs a step, which must be there.
  void RunStep() {
    const std::optional<Work> work = engine_.Next();
    ASSERT_TRUE(work && std::holds_alternative<dispatch::RunStep>(*work));
    dispatcher().steps().Complete(std::get<dispatch::RunStep>(*work).step.id,
                                  CheckpointInfo());
  }

  FakeEngineThread engine_{{}};
  std::vector<absl::StatusCode> drains_;
};

TEST_F(DrainTest, ItTakesSavesThatCanRunAndNothingElse) {
  EXPECT_EQ(Train(1), kUnavailable);
  EXPECT_EQ(Save(2), kUnavailable);  // Step 1 cannot come any more.
  EXPECT_EQ(Save(1), std::nullopt);
  RunStep();
  EXPECT_EQ(Save(0), std::nullopt);
  RunStep();
  (void)engine_.Next();
  engine_.RunReplies();
  EXPECT_THAT(drains_, ElementsAre(absl::StatusCode::kOk));
  EXPECT_EQ(Save(0), std::nullopt);  // Also after the drain has ended.
  RunStep();
}

TEST_F(DrainTest, ItDoesNotWaitForReadsThatCameLater) {
  const std::shared_ptr<void> read = dispatcher().Hold();
  (void)engine_.Next();
  engine_.RunReplies();
  EXPECT_THAT(drains_, ElementsAre(absl::StatusCode::kOk));
}

TEST_F(DrainTest, ASaveBehindStepsThatWaitIsRefused) {
  dispatcher().Undrain();
  EXPECT_EQ(Train(1), std::nullopt);  // Waits for its turn.
  dispatcher().Drain([](const absl::StatusOr<bool>&) {});
  EXPECT_EQ(Save(0), kUnavailable);
}

// Another step behind a gap ends, because its caller sends it again.
TEST(KeptStepTest, BehindAGapItOutlivesADrainWhichDoesNotWaitForIt) {
  FakeEngineThread engine({.records_steps = true});
  Dispatcher& dispatcher = engine.dispatcher();
  engine.Create("a", "tenant", [](const absl::StatusOr<AdapterKey>&) {});
  (void)engine.Next();
  std::vector<std::string> ends;
  const auto submit = [&](uint64_t step, const std::string& name) {
    const auto say = [&ends, name](const char* what) {
      ends.push_back(name + what);
    };
    const KeepStep keep{.note = "n", .kept = [say] { say(" kept"); }};
    (void)dispatcher.steps().Submit(
        OneDatum("a", step), TrainItem(),
        [say](const absl::StatusOr<StepResultPtr>& result, bool) {
          say(result.ok() ? " done" : " lost");
        },
        {.step = name == "kept" ? keep : KeepStep(),
         .record = [say](uint64_t, AdapterKey) { say(" recorded"); }});
  };
  submit(2, "kept");
  submit(3, "other");
  bool drained = false;
  dispatcher.Drain(
      [&](const absl::StatusOr<bool>& done) { drained = done.ok(); });
  (void)engine.Next();
  engine.RunReplies();
  EXPECT_TRUE(drained);
  EXPECT_THAT(ends, ElementsAre("kept recorded", "kept kept", "other lost"));
  const std::vector<AcceptedStep> kept = dispatcher.recovery().Kept();
  ASSERT_EQ(kept.size(), 1);
  EXPECT_EQ(kept[0].step, 2);
  EXPECT_EQ(kept[0].note, "n");

  dispatcher.Undrain();
  engine.Train("a", 1);
  const std::optional<Work> work = engine.Next();
  ASSERT_TRUE(work && std::holds_alternative<RunTrain>(*work));
  const auto& slices = std::get<RunTrain>(*work).slices;
  ASSERT_EQ(slices.size(), 2);
  EXPECT_FALSE(slices[0].step.kept);
  EXPECT_TRUE(slices[1].step.kept);
  EXPECT_EQ(slices[1].step.id, kept[0].work);
  for (const auto& [slice, step] : slices) {
    dispatcher.steps().Complete(step.id, TrainResult());
  }
  engine.RunReplies();
  EXPECT_EQ(ends.back(), "kept done");
  EXPECT_THAT(dispatcher.recovery().Kept(), IsEmpty());
}

TEST_F(DrainTest, TheLastOneTakesNoSaveAndWaitsForAll) {
  std::shared_ptr<void> read = dispatcher().Hold();
  dispatcher().Finish([this](const absl::StatusOr<bool>& drained) {
    drains_.push_back(drained.status().code());
  });
  EXPECT_EQ(Save(1), kUnavailable);
  (void)engine_.Next();
  engine_.RunReplies();
  EXPECT_THAT(drains_, IsEmpty());
  read = nullptr;
  (void)engine_.Next();
  engine_.RunReplies();
  EXPECT_THAT(drains_,
              ElementsAre(absl::StatusCode::kOk, absl::StatusCode::kOk));
}

TEST_F(DrainTest, AServerThatStopsTakesNoSave) {
  dispatcher().Stop();
  EXPECT_EQ(Save(1), kUnavailable);
}

TEST_F(DrainTest, ItCanBeTakenBack) {
  EXPECT_EQ(Save(1), std::nullopt);
  dispatcher().Undrain();
  engine_.RunReplies();
  EXPECT_THAT(drains_, ElementsAre(absl::StatusCode::kAborted));
  EXPECT_FALSE(dispatcher().drained());
  EXPECT_EQ(Train(2), std::nullopt);
  drains_.clear();
  RunStep();
  (void)engine_.Next();
  engine_.RunReplies();
  EXPECT_THAT(drains_, IsEmpty());
}

}  // namespace
}  // namespace weft::dispatch
