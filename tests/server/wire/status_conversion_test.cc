#include "server/wire/status_conversion.h"

#include <string>

#include "gtest/gtest.h"
#include "src/base/reason.h"
#include "src/request/reply.h"
#include "weft/v1/errors.pb.h"

namespace weft::server {
namespace {

TEST(StatusConversionTest, LongMessagesAreCutAtACharacter) {
  const std::string plain(2000, 'x');
  EXPECT_EQ(ToGrpcStatus(absl::InternalError(plain)).error_message().size(),
            kMaxStatusMessageBytes);
  std::string wide = "x";  // Moves the cut into a two-byte character.
  for (int i = 0; i < 1000; ++i) wide += "\xC3\xA9";
  const std::string message =
      ToGrpcStatus(absl::InternalError(wide)).error_message();
  EXPECT_EQ(message.size(), kMaxStatusMessageBytes - 1);
  EXPECT_EQ(message.back(), '\xA9');
}

TEST(StatusConversionTest, AReasonIsInTheDetails) {
  const grpc::Status status = ToGrpcStatus(WithReason(
      absl::ResourceExhaustedError("full"),
      {.name = "SHARE_IN_USE", .values = {{"limit", "3"}, {"flag", "a=b"}}}));
  v1::StatusDetails details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(details.message(), "full");
  ASSERT_EQ(details.details_size(), 1);
  EXPECT_EQ(details.details(0).type_url(),
            "type.googleapis.com/google.rpc.ErrorInfo");
  v1::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(details.details(0).value()));
  EXPECT_EQ(info.reason(), "SHARE_IN_USE");
  EXPECT_EQ(info.domain(), "weft");
  EXPECT_EQ(info.metadata().at("limit"), "3");
  EXPECT_EQ(info.metadata().at("flag"), "a=b");
  EXPECT_TRUE(ToGrpcStatus(absl::InternalError("x")).error_details().empty());
}

TEST(StatusConversionTest, OnlyWaitingThatHelpsIsAdvised) {
  const auto full = [](const char* reason) {
    return WithReason(absl::ResourceExhaustedError(""),
                      {.name = reason, .values = {}});
  };
  EXPECT_EQ(RetryMillis(absl::UnavailableError("")), kRetryPushbackMillis);
  EXPECT_EQ(
      RetryMillis(WithReason(absl::UnavailableError(""),
                             {.name = "ADAPTER_RECOVERING", .values = {}})),
      kRetryPushbackMillis);
  EXPECT_EQ(RetryMillis(WithReason(absl::UnavailableError(""),
                                   {.name = "ADAPTER_RECOVERING",
                                    .values = {{"retry_ms", "100"}}})),
            100);
  for (const char* reason :
       {"CALLS_UNDER_WAY", "TOKEN_RATE", "IMPORTS_UNDER_WAY", "STATE_DISK_FULL",
        "SHARE_IN_USE", "SAMPLER_CACHE_FULL", "CHECKPOINT_STORE_UNREACHABLE"}) {
    EXPECT_EQ(RetryMillis(full(reason)), kRetryPushbackMillis) << reason;
  }
  for (const char* reason : {"CHECKPOINT_DISK_FULL", "ALL_ADAPTER_SLOTS_IN_USE",
                             "ADAPTER_BYTES", "TOO_LARGE", "OUT_OF_MEMORY"}) {
    EXPECT_EQ(RetryMillis(full(reason)), std::nullopt) << reason;
  }
  EXPECT_EQ(RetryMillis(absl::ResourceExhaustedError("")), std::nullopt);
  EXPECT_EQ(RetryMillis(absl::FailedPreconditionError("")), std::nullopt);
  EXPECT_EQ(RetryMillis(WithReason(
                absl::ResourceExhaustedError(""),
                {.name = "TOKEN_RATE", .values = {{"retry_ms", "4100"}}})),
            4100);
  // A step that has this result keeps it.
  absl::Status result = full("CHECKPOINT_STORE_UNREACHABLE");
  result.SetPayload(kStepDonePayload, {});
  EXPECT_EQ(RetryMillis(result), std::nullopt);
}

}  // namespace
}  // namespace weft::server
