#include "src/dispatch/replay_table.h"

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace weft::dispatch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Verdict = ReplayTable::Verdict;

StepResultPtr Value(uint64_t version) {
  return std::make_shared<const StepResult>(
      PublishedSnapshot{.version = version});
}

TEST(ReplayTableTest, ReplaysTheResultOfADoneStep) {
  ReplayTable table;
  EXPECT_EQ(table.Lookup(1, "a")->verdict, Verdict::kNew);
  table.Begin(1, "a", /*work_id=*/7);
  EXPECT_EQ(table.Lookup(1, "a")->verdict, Verdict::kInFlight);
  EXPECT_EQ(table.Lookup(1, "a")->work_id, 7u);
  table.Complete(1, Value(42));
  const auto answer = table.Lookup(1, "a").value();
  EXPECT_EQ(answer.verdict, Verdict::kReplay);
  EXPECT_EQ(std::get<PublishedSnapshot>(*answer.result).version, 42u);
}

TEST(ReplayTableTest, RefusesAnotherPayloadInFlightAndDone) {
  ReplayTable table;
  table.Begin(3, "a", /*work_id=*/7);
  EXPECT_THAT(table.Lookup(3, "b"),
              IsStatus(absl::StatusCode::kAlreadyExists, "step 3"));
  table.Complete(3, Value(1));
  EXPECT_THAT(table.Lookup(3, "b"),
              IsStatus(absl::StatusCode::kAlreadyExists, "step 3"));
}

TEST(ReplayTableTest, AStepOfVersion01IsRepeatedWithARequestOfItsType) {
  StepRequest publish = PublishSnapshotRequest{.name = "x"};
  StepRequest optim = OptimStepRequest{};
  ReplayTable table;
  table.Begin(1, std::string(32, 'a'), /*work_id=*/7);
  table.Complete(1, Value(42));
  EXPECT_EQ(table.Lookup(1, PayloadDigest(publish))->verdict, Verdict::kReplay);
  EXPECT_THAT(table.Lookup(1, PayloadDigest(optim)),
              IsStatus(absl::StatusCode::kAlreadyExists, "step 1"));
}

TEST(ReplayTableTest, ForgetsFailedSteps) {
  ReplayTable table;
  table.Begin(1, "a", /*work_id=*/7);
  table.Fail(1);
  EXPECT_EQ(table.Lookup(1, "b")->verdict, Verdict::kNew);
  table.Complete(1, Value(1));  // The step is not in flight, so
                                // this has no effect.
  EXPECT_THAT(table.done(), IsEmpty());
}

TEST(ReplayTableTest, RefusesStepsOlderThanTheWindow) {
  ReplayTable table(/*window=*/2);
  for (const uint64_t step : {1, 2, 3}) {
    table.Begin(step, "a", /*work_id=*/7);
    table.Complete(step, Value(0));
  }
  EXPECT_THAT(table.Lookup(1, "a"),
              IsStatus(absl::StatusCode::kOutOfRange, "from step 2"));
  EXPECT_EQ(table.Lookup(2, "a")->verdict, Verdict::kReplay);
  EXPECT_EQ(table.Lookup(4, "a")->verdict, Verdict::kNew);
}

TEST(ReplayTableTest, NamesTheStepsThatLeaveTheWindow) {
  ReplayTable table(/*window=*/1);
  table.Begin(1, "a", 7);
  EXPECT_THAT(table.Complete(1, Value(1)), IsEmpty());
  table.Begin(2, "a", 8);
  EXPECT_THAT(table.Complete(2, Value(2)), ElementsAre(1));
}

TEST(ReplayTableTest, AStepWhoseResultWasDroppedIsStillDone) {
  ReplayTable table;
  table.Begin(9, "a", 7);
  table.Complete(9, Value(1));
  table.DropResult(9);
  EXPECT_THAT(table.Lookup(9, "a"),
              IsStatus(absl::StatusCode::kOutOfRange,
                       "step 9 is done and its result is no longer kept"));
  EXPECT_THAT(table.Lookup(9, "b"),
              IsStatus(absl::StatusCode::kAlreadyExists, "step 9"));
}

TEST(ReplayTableTest, CallsWithoutANumberAreAlwaysNew) {
  ReplayTable table;
  table.Begin(0, "a", /*work_id=*/7);
  table.Complete(0, Value(1));
  EXPECT_EQ(table.Lookup(0, "a")->verdict, Verdict::kNew);
}

}  // namespace
}  // namespace weft::dispatch
