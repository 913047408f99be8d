#include "client/retry.h"

#include "gtest/gtest.h"
#include "src/base/clock.h"

namespace weft::client {
namespace {

constexpr double kMiddle = 0.5;  // This draw gives no jitter.

RetryPolicy Policy() {
  return {.max_attempts = 4,
          .initial_delay = absl::Seconds(1),
          .max_delay = absl::Seconds(3)};
}

std::optional<absl::Duration> Delay(int attempt, const Failure& failure,
                                    double draw = kMiddle) {
  return NextDelay(Policy(), attempt, failure, absl::Seconds(100), draw);
}

TEST(NextDelayTest, GrowsToItsBoundAndEnds) {
  const Failure failure{absl::UnavailableError(""), {}};
  EXPECT_EQ(Delay(1, failure), absl::Seconds(1));
  EXPECT_EQ(Delay(2, failure), absl::Seconds(2));
  EXPECT_EQ(Delay(3, failure), absl::Seconds(3));
  EXPECT_EQ(Delay(4, failure), std::nullopt);
}

// A run outlives a restart of the server, however long it takes. But a client
// with a wrong address says so at once.
TEST(NextDelayTest, HasNoLimitOnceThereWasAnAnswer) {
  Failure failure{absl::UnavailableError(""), {}};
  const absl::Duration left = absl::Minutes(10);
  EXPECT_EQ(NextDelay({}, 100, failure, left, kMiddle), absl::Seconds(5));
  failure.answered = false;
  EXPECT_TRUE(NextDelay({}, kFirstAttempts - 1, failure, left, kMiddle));
  EXPECT_FALSE(NextDelay({}, kFirstAttempts, failure, left, kMiddle));
}

TEST(NextDelayTest, VariesByTheJitter) {
  const Failure failure{absl::UnavailableError(""), {}};
  EXPECT_EQ(Delay(1, failure, 0), absl::Milliseconds(800));
  EXPECT_GT(Delay(1, failure, 0.99), absl::Milliseconds(1190));
}

TEST(NextDelayTest, WaitsAsLongAsTheServerSays) {
  const Failure hinted{absl::ResourceExhaustedError(""), absl::Seconds(9)};
  EXPECT_EQ(Delay(0, hinted, 0), absl::Seconds(9));
  EXPECT_EQ(Delay(0, hinted), absl::Seconds(9.9));
  EXPECT_EQ(NextDelay(Policy(), 1, hinted, absl::Seconds(9), kMiddle),
            std::nullopt);
}

// A refusal with a hint does not count as an attempt, so only the deadline ends
// the retries. But max_attempts 1 permits no retry at all.
TEST(NextDelayTest, CountsNoAttemptThatWasHinted) {
  RetryPolicy policy = Policy();
  const Failure hinted{absl::UnavailableError(""), absl::Seconds(2)};
  EXPECT_TRUE(NextDelay(policy, 4, hinted, absl::Seconds(100), kMiddle));
  policy.max_attempts = 1;
  EXPECT_FALSE(NextDelay(policy, 0, hinted, absl::Seconds(100), kMiddle));
}

TEST(NextDelayTest, DoesNotRepeatOtherErrors) {
  EXPECT_EQ(Delay(1, {absl::ResourceExhaustedError(""), {}}), std::nullopt);
  EXPECT_EQ(Delay(1, {absl::InternalError(""), absl::Seconds(1)}),
            std::nullopt);
  EXPECT_EQ(Delay(1, {absl::UnavailableError(""), {}, /*repeatable=*/false}),
            std::nullopt);
  EXPECT_EQ(Delay(1, {absl::InvalidArgumentError(""), {}}), std::nullopt);
  EXPECT_EQ(Delay(1, {absl::DeadlineExceededError(""), {}}), std::nullopt);
}

TEST(FromGrpcStatusTest, MapsCodesOneToOne) {
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
  for (int code = 1; code <= 16; ++code) {
    const grpc::Status status(static_cast<grpc::StatusCode>(code), "because");
    EXPECT_EQ(static_cast<int>(FromGrpcStatus(status).code()), code);
    EXPECT_EQ(FromGrpcStatus(status).message(), "because");
  }
}

TEST(ToGrpcTimeTest, KeepsTheTimeThatIsLeft) {
  const auto left = [](absl::Duration duration) {
    const gpr_timespec time = ToGrpcTime(SteadyNow() + duration);
    EXPECT_EQ(time.clock_type, GPR_CLOCK_MONOTONIC);
    return gpr_time_to_millis(gpr_time_sub(time, gpr_now(GPR_CLOCK_MONOTONIC)));
  };
  EXPECT_GT(left(absl::Seconds(90)), 60'000);
  EXPECT_LE(left(absl::Seconds(90)), 90'000);
  EXPECT_LE(left(-absl::Seconds(1)), -1000);
  EXPECT_EQ(ToGrpcTime(absl::InfiniteFuture()).tv_sec,
            gpr_inf_future(GPR_CLOCK_MONOTONIC).tv_sec);
}

}  // namespace
}  // namespace weft::client
