// Tests work of a held adapter, whose tensors are not on the device. The work
// waits, and the work of other adapters continues.
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/dispatch/scheduler.h"
#include "tests/support/adapter_keys.h"

namespace weft::dispatch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class HeldAdapterTest : public ::testing::Test {
 protected:
  HeldAdapterTest()
      : scheduler_({.max_batch_tokens = 1000, .sampling_share = 0.5}) {
    scheduler_.AddAdapter(Key("held"), "held", "held", 0);
    scheduler_.AddAdapter(Key("free"), "free", "free", 0);
    scheduler_.SetHeld(Key("held"), true);
  }

  void Train(uint64_t id, const std::string& adapter, uint64_t step = 0) {
    ASSERT_TRUE(scheduler_
                    .Enqueue({.id = id,
                              .kind = WorkKind::kTrain,
                              .adapter = Key(adapter),
                              .step = step,
                              .datum_tokens = {10}},
                             now_)
                    .ok());
  }

  void Sample(uint64_t id, const std::string& adapter) {
    ASSERT_TRUE(scheduler_
                    .Enqueue({.id = id,
                              .kind = WorkKind::kSample,
                              .adapter = Key(adapter),
                              .tokens = 10},
                             now_)
                    .ok());
  }

  std::vector<uint64_t> Slices() {
    std::vector<uint64_t> ids;
    for (const TrainSlice& slice : scheduler_.Next(now_, 0).slices) {
      ids.push_back(slice.work_id);
    }
    return ids;
  }

  const absl::Time now_ = absl::UnixEpoch();
  Scheduler scheduler_;
};

TEST_F(HeldAdapterTest, ItsTrainingWaitsAndThatOfOthersRuns) {
  Train(1, "held");
  Train(2, "free");
  EXPECT_NE(scheduler_.ReadyKinds(Key("held")), 0);
  EXPECT_THAT(Slices(), ElementsAre(2));
  scheduler_.Finished(2, true);
  EXPECT_EQ(scheduler_.Next(now_, 0).kind, Plan::Kind::kNone);
  scheduler_.SetHeld(Key("held"), false);
  EXPECT_THAT(Slices(), ElementsAre(1));
  EXPECT_TRUE(scheduler_.IsRunning(Key("held")));
  EXPECT_EQ(scheduler_.ReadyKinds(Key("held")), 0);
}

TEST_F(HeldAdapterTest, ItsSamplesWaitAndThoseOfOthersRun) {
  Sample(1, "held");
  EXPECT_NE(scheduler_.ReadyKinds(Key("held")), 0);
  EXPECT_EQ(scheduler_.Next(now_, 0).kind, Plan::Kind::kNone);
  Sample(2, "free");
  Sample(3, "");
  EXPECT_EQ(scheduler_.Next(now_, 0).kind, Plan::Kind::kDecode);
  EXPECT_THAT(scheduler_.TakeSamples(now_, 9), ElementsAre(2, 3));
  scheduler_.SetHeld(Key("held"), false);
  EXPECT_THAT(scheduler_.TakeSamples(now_, 9), ElementsAre(1));
}

TEST_F(HeldAdapterTest, WorkBehindAGapIsNotReady) {
  Train(1, "held", /*step=*/2);
  EXPECT_EQ(scheduler_.ReadyKinds(Key("held")), 0);
  Train(2, "held", /*step=*/1);
  EXPECT_NE(scheduler_.ReadyKinds(Key("held")), 0);
  EXPECT_EQ(scheduler_.ReadyKinds(Key("unknown")), 0);
}

TEST_F(HeldAdapterTest, ARequestBetweenTwoSlicesRuns) {
  ASSERT_TRUE(scheduler_
                  .Enqueue({.id = 1,
                            .kind = WorkKind::kTrain,
                            .adapter = Key("free"),
                            .datum_tokens = {6000, 6000}},
                           now_)
                  .ok());
  EXPECT_FALSE(scheduler_.IsRunning(Key("free")));
  EXPECT_THAT(Slices(), ElementsAre(1));
  scheduler_.Finished(1, true);
  EXPECT_TRUE(scheduler_.IsRunning(Key("free")));
  EXPECT_THAT(scheduler_.WaitingOf(Key("free")), IsEmpty());
}

TEST_F(HeldAdapterTest, ItsWorkThatIsTakenBackEndsWithoutTheDevice) {
  Train(1, "held");
  Train(2, "held");
  Sample(3, "held");
  Train(4, "free");
  EXPECT_THAT(scheduler_.WaitingOf(Key("held")), ElementsAre(3, 2, 1));
  EXPECT_TRUE(scheduler_.Remove(3));  // A sample.
  EXPECT_FALSE(scheduler_.Remove(2));
  EXPECT_TRUE(scheduler_.Empty(2));
  EXPECT_TRUE(scheduler_.Empty(1));
  EXPECT_EQ(scheduler_.ReadyKinds(Key("held")), 0);
  std::set<uint64_t> ran;
  while (scheduler_.LastStep(Key("held")) < 2) {
    const Plan plan = scheduler_.Next(now_, /*active_decodes=*/0);
    ASSERT_NE(plan.kind, Plan::Kind::kNone);
    if (plan.kind == Plan::Kind::kExclusive) {
      ran.insert(plan.work_id);
      scheduler_.Finished(plan.work_id, /*ok=*/false);
    }
  }
  EXPECT_THAT(ran, ElementsAre(1, 2));
  Train(5, "held", /*step=*/3);
  EXPECT_THAT(Slices(), IsEmpty());
}

TEST_F(HeldAdapterTest, ANewAdapterOfTheNameIsNotHeld) {
  scheduler_.RemoveAdapter(Key("held"));
  scheduler_.AddAdapter(Key("held"), "held", "held", 0);
  Train(1, "held");
  EXPECT_THAT(Slices(), ElementsAre(1));
}

}  // namespace
}  // namespace weft::dispatch
