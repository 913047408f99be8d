// Tests the refusals of Enqueue: codes and messages. The scenarios in
// tests/dispatch/scenarios test accepted requests.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
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
  EnqueueTest()
      : scheduler_({.max_batch_tokens = 100,
                    .queue = {.max_requests = 4, .max_tokens = 50}}) {
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

TEST_F(EnqueueTest, NamesTheExpectedStepWhenANumberIsTooFarAhead) {
  ASSERT_THAT(scheduler_.Enqueue(Train(1, 8 + 256), kNow), IsOk());
  EXPECT_THAT(scheduler_.Enqueue(Train(2, 8 + 257), kNow),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       "more than 256 steps ahead; expected step 8"));
}

TEST_F(EnqueueTest, RefusesAnAdapterItDoesNotKnow) {
  WorkItem item = Train(1, 8);
  item.adapter = Key("ghost");
  EXPECT_THAT(scheduler_.Enqueue(item, kNow),
              IsStatus(absl::StatusCode::kNotFound, "does not exist"));
}

TEST_F(EnqueueTest, NamesTheLimitThatIsReached) {
  WorkItem item = Train(1, 0);
  item.datum_tokens = {30};
  ASSERT_THAT(scheduler_.Enqueue(item, kNow), IsOk());
  item.id = 2;
  EXPECT_THAT(
      scheduler_.Enqueue(item, kNow),
      IsStatus(absl::StatusCode::kResourceExhausted, "max_queue_tokens 50"));
  for (uint64_t id = 3; id < 6; ++id) {
    WorkItem optim = Train(id, 0);
    optim.kind = WorkKind::kOptim;
    optim.datum_tokens.clear();
    ASSERT_THAT(scheduler_.Enqueue(optim, kNow), IsOk());
  }
  EXPECT_THAT(scheduler_.Enqueue(Train(6, 0), kNow),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       "max_queue_requests is 4"));
}

TEST(TenantLimitsTest, AreNamedWhenReached) {
  Scheduler scheduler({.queue = {.max_requests = 8,
                                 .max_tokens = 100,
                                 .max_requests_per_tenant = 2,
                                 .max_tokens_per_tenant = 25}});
  scheduler.AddAdapter(Key("a"), "a", "alice", 0);
  ASSERT_THAT(scheduler.Enqueue(Train(1, 0), kNow), IsOk());
  WorkItem item = Train(2, 0);
  item.datum_tokens = {16};
  EXPECT_THAT(scheduler.Enqueue(item, kNow),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       "10 tokens of tenant \"alice\" wait, 16 more would "
                       "exceed max_queue_tokens_per_tenant 25"));
  ASSERT_THAT(scheduler.Enqueue(Train(2, 0), kNow), IsOk());
  EXPECT_THAT(scheduler.Enqueue(Train(3, 0), kNow),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       "2 requests of tenant \"alice\" wait, "
                       "max_queue_requests_per_tenant is 2"));
}

TEST(TenantLimitsTest, PromisedWorkWaitsWithoutRoomAndKeepsItsPlace) {
  Scheduler scheduler(
      {.queue = {.max_requests = 2, .max_tokens = 100}, .reorder_window = 4});
  scheduler.AddAdapter(Key("a"), "a", "alice", 0);
  for (uint64_t id = 1; id <= 6; ++id) {
    WorkItem promised = Train(id, 10 * id);
    promised.promised = true;
    ASSERT_THAT(scheduler.Enqueue(promised, kNow), IsOk());
  }
  std::vector<uint64_t> displaced;
  EXPECT_THAT(scheduler.Enqueue(Train(7, 1), kNow, &displaced),
              IsStatus(absl::StatusCode::kResourceExhausted, "6 requests"));
  EXPECT_EQ(displaced, std::vector<uint64_t>());
}

TEST(TenantLimitsTest, LeaveACallForTheStepThatOthersWaitFor) {
  Scheduler scheduler(
      {.queue = {
           .max_requests = 8, .max_tokens = 100, .max_calls_per_tenant = 3}});
  scheduler.AddAdapter(Key("a"), "a", "alice", 0);
  const auto enqueue = [&](uint64_t id, uint64_t step) {
    std::vector<uint64_t> displaced;
    return std::pair(scheduler.Enqueue(Train(id, step), kNow, &displaced),
                     displaced);
  };
  ASSERT_THAT(enqueue(1, 2).first, IsOk());
  ASSERT_THAT(enqueue(2, 3).first, IsOk());
  EXPECT_THAT(
      enqueue(3, 4).first,
      IsStatus(
          absl::StatusCode::kResourceExhausted,
          "2 requests of tenant \"alice\" wait, max_calls_per_tenant is 3"));
  const auto [missing, displaced] = enqueue(4, 1);
  EXPECT_THAT(missing, IsOk());
  EXPECT_EQ(displaced, std::vector<uint64_t>({2}));
  // The base model belongs to all tenants.
  for (uint64_t id = 5; id < 10; ++id) {
    WorkItem forward = Train(id, 0);
    forward.adapter = AdapterKey::kBaseModel;
    forward.backward = false;
    EXPECT_THAT(scheduler.Enqueue(forward, kNow), IsOk());
  }
}

// A full queue still accepts requests of a tenant that has none in it. With 40
// tenants the queue stays within `bound` times its limits.
TEST(TenantLimitsTest, NeverShutOutATenant) {
  Scheduler scheduler({.queue = {.max_requests = 64,
                                 .max_tokens = 640,
                                 .max_requests_per_tenant = 16,
                                 .max_tokens_per_tenant = 160}});
  uint64_t id = 0;
  for (int tenant = 1; tenant <= 40; ++tenant) {
    WorkItem item = Train(++id, 0);
    const std::string name = absl::StrCat("adapter", tenant);
    item.adapter = Key(name);
    scheduler.AddAdapter(item.adapter, name, name, 0);
    int64_t accepted = 0;
    for (; scheduler.Enqueue(item, kNow).ok(); item.id = ++id) ++accepted;
    EXPECT_GE(accepted, std::min(16, std::max(64 / tenant, 1)));
  }
  const double bound = 2 + std::log(40.0);
  EXPECT_LE(scheduler.room().total().requests, 64 * bound);
  EXPECT_LE(scheduler.room().total().tokens, 640 * bound);
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
  EXPECT_EQ(scheduler_.room().total().tokens, 0);
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

}  // namespace
}  // namespace weft::dispatch
