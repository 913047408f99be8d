#include "client/step_counter.h"

#include "gtest/gtest.h"

namespace weft::client {
namespace {

const absl::Status kBad = absl::InvalidArgumentError("bad");

TEST(StepCounterTest, TakesRefusedNumbersBackInAnyOrder) {
  StepCounter counter(4);
  const uint64_t first = counter.Take()->step;
  const uint64_t second = counter.Take()->step;
  EXPECT_EQ(second, 6);
  EXPECT_EQ(counter.Finish(second, StepOutcome::kRefused, kBad), kBad);
  EXPECT_EQ(counter.Finish(first, StepOutcome::kRefused, kBad), kBad);
  EXPECT_EQ(counter.Take()->step, 5);
}

TEST(StepCounterTest, CancelsWhatComesAfterARefusal) {
  StepCounter counter(0);
  const uint64_t first = counter.Take()->step;
  const uint64_t refused = counter.Take()->step;
  const uint64_t later = counter.Take()->step;
  int num_cancelled = 0;
  counter.SetCancel(first, [&] { num_cancelled += 100; });
  counter.SetCancel(later, [&] { ++num_cancelled; });
  EXPECT_EQ(counter.Finish(refused, StepOutcome::kRefused, kBad), kBad);
  EXPECT_EQ(num_cancelled, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(counter.Take().status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      counter.Finish(later, StepOutcome::kUnknown, absl::CancelledError(""))));
  EXPECT_TRUE(counter.Finish(first, StepOutcome::kDone, absl::OkStatus()).ok());
  EXPECT_TRUE(counter.CheckIdle().ok());
  counter.Reset(1);
  EXPECT_EQ(counter.Take()->step, 2);
}

TEST(StepCounterTest, CancelsAStepThatWasWithdrawnBeforeSetCancel) {
  StepCounter counter(0);
  const uint64_t refused = counter.Take()->step;
  const uint64_t later = counter.Take()->step;
  EXPECT_EQ(counter.Finish(refused, StepOutcome::kRefused, kBad), kBad);
  absl::Status ended;
  // The cancel function may call Finish, as a cancelled call does.
  counter.SetCancel(later, [&] {
    ended =
        counter.Finish(later, StepOutcome::kUnknown, absl::CancelledError(""));
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(ended));
  EXPECT_TRUE(counter.CheckIdle().ok());
}

TEST(StepCounterTest, GivesNoNumberAfterAnUnknownEnd) {
  StepCounter counter(0);
  const absl::Status lost = absl::UnavailableError("gone");
  EXPECT_EQ(counter.Finish(counter.Take()->step, StepOutcome::kUnknown, lost),
            lost);
  EXPECT_TRUE(absl::IsFailedPrecondition(counter.Take().status()));
  counter.Reset(1);
  EXPECT_EQ(counter.next_step(), 2);
}

TEST(StepCounterTest, AStepHasTheEpochOfItsNumber) {
  StepCounter counter(0, 7);
  const StepNumber first = *counter.Take();
  EXPECT_EQ(first.epoch, 7);
  absl::Status stale = absl::FailedPreconditionError("ended");
  stale.SetPayload(kStaleEpochPayload, {});
  // The step did not run, so its number is free again. The counter keeps its
  // epoch until Reset.
  EXPECT_EQ(counter.Finish(first.step, OutcomeOfStep(stale), stale), stale);
  EXPECT_EQ(counter.Take()->epoch, 7);
  counter.Reset(3, 9);
  const StepNumber next = *counter.Take();
  EXPECT_EQ(next.step, 4);
  EXPECT_EQ(next.epoch, 9);
}

TEST(StepCounterTest, IsNotIdleWithStepsInFlight) {
  StepCounter counter(0);
  ASSERT_TRUE(counter.Take().ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(counter.CheckIdle()));
}

TEST(OutcomeOfStepTest, KnowsWhatFreesANumber) {
  EXPECT_EQ(OutcomeOfStep(absl::OkStatus()), StepOutcome::kDone);
  EXPECT_EQ(OutcomeOfStep(kBad), StepOutcome::kRefused);
  EXPECT_EQ(OutcomeOfStep(absl::ResourceExhaustedError("")),
            StepOutcome::kRefused);
  EXPECT_EQ(OutcomeOfStep(absl::FailedPreconditionError("")),
            StepOutcome::kUnknown);
  EXPECT_EQ(OutcomeOfStep(absl::DeadlineExceededError("")),
            StepOutcome::kUnknown);
}

}  // namespace
}  // namespace weft::client
