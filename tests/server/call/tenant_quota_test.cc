#include "server/call/tenant_quota.h"

#include <memory>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "prometheus/registry.h"
#include "server/call/call.h"
#include "src/base/reason.h"
#include "tests/support/status_matchers.h"

namespace weft::server {
namespace {

constexpr absl::StatusCode kExhausted = absl::StatusCode::kResourceExhausted;

TEST(TenantQuotaTest, CountsCallsOfEachTenant) {
  TenantQuota quota(/*max_calls=*/2, /*tokens_per_second=*/0);
  EXPECT_THAT(quota.Enter("a"), IsOk());
  EXPECT_THAT(quota.Enter("a"), IsOk());
  EXPECT_THAT(quota.Enter("a"), IsStatus(kExhausted, "tenant 'a' has 2 calls"));
  EXPECT_EQ(FindReason(quota.Enter("a"))->name, "CALLS_UNDER_WAY");
  quota.Leave("a");
  EXPECT_THAT(quota.Enter("b"), IsOk());
  quota.Leave("a");
  quota.Leave("a");
  EXPECT_THAT(quota.Enter("a"), IsOk());
}

TEST(TenantQuotaTest, TellsTheLastCall) {
  TenantQuota quota(/*max_calls=*/2, /*tokens_per_second=*/0);
  EXPECT_THAT(quota.Enter("a"), IsOk());
  EXPECT_THAT(quota.CheckSpare("a"), IsOk());
  EXPECT_THAT(quota.Enter("a"), IsOk());
  EXPECT_THAT(quota.CheckSpare("a"),
              IsStatus(kExhausted, "tenant 'a' has 2 calls"));
  quota.Leave("a");
  EXPECT_THAT(quota.CheckSpare("a"), IsOk());
}

TEST(TenantQuotaTest, CallsThatNeverArriveCountForAWhile) {
  TenantQuota quota(/*max_calls=*/0, /*tokens_per_second=*/0);
  absl::Time now = absl::FromUnixSeconds(1000);
  const auto most = static_cast<int>(TenantQuota::kMaxBegun);
  for (int i = 0; i < 2 * most; ++i) {  // Calls that arrive.
    ASSERT_THAT(quota.Begin("a", now), IsOk()) << i;
    quota.Arrive("a");
  }
  for (int i = 0; i < most; ++i) ASSERT_THAT(quota.Begin("a", now), IsOk());
  const absl::Status refused = quota.Begin("a", now);
  EXPECT_THAT(refused, IsStatus(kExhausted, "tenant 'a' has begun 1024 calls"));
  EXPECT_EQ(FindReason(refused)->name, "CALLS_UNDER_WAY");
  EXPECT_THAT(quota.Begin("b", now), IsOk());
  now += absl::Seconds(1);
  for (int i = 0; i < TenantQuota::kBegunPerSecond; ++i) {
    ASSERT_THAT(quota.Begin("a", now), IsOk()) << i;
  }
  EXPECT_THAT(quota.Begin("a", now), IsStatus(kExhausted, "tenant 'a'"));
}

TEST(TenantQuotaTest, ACallCountsUntilItsAnswerAndNoLonger) {
  prometheus::Registry registry;
  ServerOptions options;
  options.max_calls_per_tenant = 1;
  ServiceCore core(options, &registry);
  const auto begin = [&core] {
    const TokenEntry token{
        .id = "1", .sha256 = "", .tenant = "a", .scopes = {}};
    return std::make_unique<CallRecord>(
        &core, CallOrigin{.caller = Caller(token)}, Rpc::kGetAdapter);
  };
  const auto first = begin();
  const auto second = begin();
  const absl::Status refused = second->Admit().status();
  EXPECT_THAT(refused, IsStatus(kExhausted, "tenant 'a' has 1 calls"));
  (void)second->FinishCall(refused);
  (void)first->FinishCall(absl::OkStatus());
  // A CallRecord exists until gRPC has sent its status. But it no longer counts
  // after FinishCall, because the client may already have the status.
  const auto third = begin();
  const absl::Status admitted = third->Admit().status();
  EXPECT_THAT(admitted, IsStatus(absl::StatusCode::kUnavailable, ""));
  (void)third->FinishCall(admitted);
}

TEST(TenantQuotaTest, RepliesCountUntilTheyAreSent) {
  prometheus::Registry registry;
  ServiceCore core(ServerOptions(), &registry);
  const auto begin = [&core] {
    const TokenEntry token{
        .id = "1", .sha256 = "", .tenant = "a", .scopes = {}};
    return std::make_unique<CallRecord>(
        &core, CallOrigin{.caller = Caller(token)}, Rpc::kGetAdapter);
  };
  const int64_t share = core.memory->most() / 2;
  const auto first = begin();
  EXPECT_THAT(first->Hold(core.memory->most()),
              IsStatus(absl::StatusCode::kUnavailable, "no room"));
  // What is left of the share is less than a call takes.
  EXPECT_THAT(first->Hold(share - (40 << 10)), IsOk());
  (void)first->FinishCall(absl::OkStatus());
  const auto second = begin();
  const absl::Status refused = second->Admit().status();
  EXPECT_THAT(refused, IsStatus(kExhausted, "your requests"));
  EXPECT_EQ(FindReason(refused)->name, "SHARE_IN_USE");
  (void)second->FinishCall(refused);
  first->Release();
  const auto third = begin();
  const absl::Status admitted = third->Admit().status();
  EXPECT_THAT(admitted, IsStatus(absl::StatusCode::kUnavailable, ""));
  (void)third->FinishCall(admitted);
}

TEST(TenantQuotaTest, RefusesTheRateAndNotTheSize) {
  TenantQuota quota(/*max_calls=*/0, /*tokens_per_second=*/100);
  const absl::Time start = absl::FromUnixSeconds(1000);
  // The credit is ten seconds' worth; spending more puts the tenant in debt.
  EXPECT_THAT(quota.Spend("a", 1500, start), IsOk());
  EXPECT_THAT(quota.Spend("a", 1, start),
              IsStatus(kExhausted, "in credit again in 5s"));
  const std::optional<Reason> reason = FindReason(quota.Spend("a", 1, start));
  ASSERT_TRUE(reason);
  EXPECT_EQ(reason->name, "TOKEN_RATE");
  EXPECT_EQ(reason->values.at("retry_ms"), "5000");
  EXPECT_THAT(quota.Spend("b", 1, start), IsOk());
  EXPECT_THAT(quota.Spend("a", 1, start + absl::Seconds(4.9)),
              IsStatus(kExhausted, "in 100ms"));
  EXPECT_THAT(quota.Spend("a", 1000, start + absl::Seconds(5.1)), IsOk());
  // Credit stops at the burst. It does not grow when the clock goes back.
  const absl::Time later = start + absl::Hours(1);
  EXPECT_THAT(quota.Spend("a", 1000, later), IsOk());
  EXPECT_THAT(quota.Spend("a", 1, later - absl::Hours(1)),
              IsStatus(kExhausted, "tokens per second"));
}

TEST(TenantQuotaTest, GivesBackNoMoreThanTheBurst) {
  TenantQuota quota(/*max_calls=*/0, /*tokens_per_second=*/100);
  const absl::Time start = absl::FromUnixSeconds(1000);
  EXPECT_THAT(quota.Spend("a", 1500, start), IsOk());
  quota.Refund("a", 1500);
  EXPECT_THAT(quota.Spend("a", 1000, start + absl::Seconds(5)), IsOk());
  EXPECT_THAT(quota.Spend("a", 1, start + absl::Seconds(5)),
              IsStatus(kExhausted, "tokens per second"));
}

TEST(TenantQuotaTest, NoLimitMeansNone) {
  TenantQuota quota(0, 0);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_THAT(quota.Enter("a"), IsOk());
    EXPECT_THAT(quota.Spend("a", 1 << 30, absl::Now()), IsOk());
  }
}

}  // namespace
}  // namespace weft::server
