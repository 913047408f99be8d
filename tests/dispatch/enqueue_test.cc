// Tests the refusals of Enqueue, their codes and messages, and what the
// scheduler tells of its queue. The scenarios in scenarios/ test accepted
// requests.
#include "gtest/gtest.h"
#include "src/dispatch/scheduler.h"
#include "tests/support/adapter_keys.h"
#include "tests/support/status_matchers.h"

namespace weft::dispatch {
namespace {

const absl::Time kNow = absl::UnixEpoch();

WorkItem Train(uint64_t id, uint64_t step) {
  WorkItem item;
  item.id = id;
  item.adapter = Key("a");
  item.step = step;
  item.backward = true;
  item.datum_tokens = {10};
  return item;
}

class EnqueueTest : public testing::Test {
 protected:
  EnqueueTest() : scheduler_({.max_batch_tokens = 100}) {
    scheduler_.AddAdapter(Key("a"), "a", "a", 7);
  }

  Scheduler scheduler_;
};

TEST_F(EnqueueTest, NamesTheExpectedStepWhenANumberIsOfThePast) {
  EXPECT_THAT(scheduler_.Enqueue(Train(1, 7), kNow),
              IsStatus(absl::StatusCode::kFailedPrecondition,
                       "step 7 of adapter \"a\" is in the past; expected "
                       "step 8"));
}

TEST_F(EnqueueTest, NamesTheExpectedStepWhenANumberIsWaiting) {
  ASSERT_THAT(scheduler_.Enqueue(Train(1, 8), kNow), IsOkAndHolds(8u));
  EXPECT_THAT(scheduler_.Enqueue(Train(2, 8), kNow),
              IsStatus(absl::StatusCode::kAlreadyExists, "expected step 9"));
}

TEST_F(EnqueueTest, TimeOfAReplayIsNoTimeOfTheNextBatch) {
  scheduler_.ChargeTime(Key("a"), absl::Minutes(1));
  ASSERT_THAT(scheduler_.Enqueue(Train(1, 8), kNow), IsOk());
  const Plan plan = scheduler_.Next(kNow, /*active_decodes=*/0);
  ASSERT_EQ(plan.kind, Plan::Kind::kTrain);
  scheduler_.AccountDeviceTime(plan.kind, absl::Seconds(1));
  EXPECT_EQ(scheduler_.batch_window().TokensOf(absl::Seconds(1)), 10);
}

TEST_F(EnqueueTest, RefusesAnAdapterItDoesNotKnow) {
  WorkItem item = Train(1, 8);
  item.adapter = Key("ghost");
  EXPECT_THAT(scheduler_.Enqueue(item, kNow),
              IsStatus(absl::StatusCode::kNotFound, "does not exist"));
}

TEST_F(EnqueueTest, RefusesWhatIsLate) {
  WorkItem item = Train(1, 0);
  item.deadline = kNow;
  EXPECT_THAT(scheduler_.Enqueue(item, kNow),
              IsStatus(absl::StatusCode::kDeadlineExceeded, "deadline"));
}

TEST_F(EnqueueTest, RefusesMalformedWork) {
  const auto refuses = [this](const WorkItem& item, const char* problem) {
    EXPECT_THAT(scheduler_.Enqueue(item, kNow),
                IsStatus(absl::StatusCode::kInvalidArgument, problem));
  };
  WorkItem item = Train(1, 0);
  item.datum_tokens.clear();
  refuses(item, "must have data");
  item.datum_tokens = {3, 0};
  refuses(item, "less than one token");
  item = Train(1, 0);
  item.kind = WorkKind::kOptim;
  refuses(item, "must have data if and only if");
  item.datum_tokens.clear();
  item.tokens = -1;
  refuses(item, "negative cost");
  item = Train(1, 0);
  item.unnumbered = true;
  refuses(item, "unnumbered");
  item = Train(1, 8);
  item.unnumbered = true;
  item.backward = false;
  refuses(item, "unnumbered");
  EXPECT_TRUE(scheduler_.Idle());
  EXPECT_EQ(scheduler_.QueueDepthOf("a"), 0);
}

TEST_F(EnqueueTest, TellsTheNextDeadline) {
  EXPECT_EQ(scheduler_.NextDeadline(), absl::InfiniteFuture());
  WorkItem item = Train(1, 0);
  item.deadline = kNow + absl::Seconds(3);
  ASSERT_THAT(scheduler_.Enqueue(item, kNow), IsOk());
  ASSERT_THAT(scheduler_.Enqueue(Train(2, 0), kNow), IsOk());
  EXPECT_EQ(scheduler_.NextDeadline(), kNow + absl::Seconds(3));
  ASSERT_EQ(scheduler_.Next(kNow, 0).slices.size(), 2u);
  EXPECT_EQ(scheduler_.NextDeadline(), absl::InfiniteFuture());
}

TEST_F(EnqueueTest, ARequestThatHasBegunIsFinishedAfterItsDeadline) {
  WorkItem item = Train(1, 8);
  item.datum_tokens = {60, 50};
  item.deadline = kNow + absl::Seconds(1);
  ASSERT_THAT(scheduler_.Enqueue(item, kNow), IsOk());
  ASSERT_THAT(scheduler_.Enqueue(Train(2, 9), kNow), IsOk());
  EXPECT_FALSE(scheduler_.Next(kNow, 0).slices.at(0).last);
  scheduler_.Finished(1, /*ok=*/true);
  const Plan rest = scheduler_.Next(item.deadline, 0);
  EXPECT_TRUE(rest.slices.at(0).last);
  EXPECT_EQ(rest.tokens, 50);
  // Its second slice does not leave the queue again.
  EXPECT_EQ(scheduler_.QueueDepth(WorkKind::kTrain), 1);
  EXPECT_EQ(scheduler_.QueueDepthOf("a"), 1);
}

TEST_F(EnqueueTest, TheLastStepHasNoneOpenBelowIt) {
  for (const uint64_t id : {1, 2, 3}) {
    ASSERT_THAT(scheduler_.Enqueue(Train(id, 7 + id), kNow), IsOk());
  }
  ASSERT_EQ(scheduler_.Next(kNow, 0).slices.size(), 3u);
  scheduler_.Finished(3, /*ok=*/true);
  scheduler_.Finished(2, /*ok=*/true);
  EXPECT_EQ(scheduler_.LastStep(Key("a")), 7u);
  scheduler_.Finished(1, /*ok=*/true);
  EXPECT_EQ(scheduler_.LastStep(Key("a")), 10u);
}

}  // namespace
}  // namespace weft::dispatch
