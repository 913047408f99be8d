// Tests ServerService.Profile, and the load that GetInfo returns.
#include <atomic>
#include <limits>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "tests/server/server_fixture.h"

namespace weft::server {
namespace {

class ProfileTest : public ServerTest {
 protected:
  // Asks for a profile. `trace` gets its JSON.
  grpc::Status Profile(uint32_t steps, double seconds, std::string* trace) {
    grpc::ClientContext context;
    v1::ProfileRequest request;
    request.set_steps(steps);
    request.set_seconds(seconds);
    const auto reader = server_->Profile(&context, request);
    v1::ProfileResponse response;
    while (reader->Read(&response)) *trace += response.trace();
    return reader->Finish();
  }

  // Waits until the server has counted a call of Profile, and then a moment
  // more, so that the engine has the request.
  void WaitUntilOneRuns() {
    ASSERT_TRUE(Eventually([this] {
      return MetricValue(
                 "grpc_server_started_total{grpc_method=\"Profile\","
                 "grpc_service=\"weft.v1.ServerService\","
                 "grpc_type=\"server_stream\"}") == 1;
    }));
    absl::SleepFor(absl::Milliseconds(50));
  }

  void Step() { EXPECT_TRUE(Send(GoodStep()).ok()); }
};

TEST_F(ProfileTest, HoldsTheWorkOfItsStepsAndEndsAfterThem) {
  StartReadyServer();
  std::string trace;
  grpc::Status status;
  std::atomic<bool> ended = false;
  std::thread profile([&] {
    status = Profile(/*steps=*/3, /*seconds=*/60, &trace);
    ended = true;
  });
  int steps = 0;
  for (; !ended && steps < 10000; ++steps) Step();
  profile.join();
  ASSERT_TRUE(status.ok()) << status.error_message();
  const auto json = nlohmann::json::parse(trace);
  EXPECT_EQ(json["otherData"]["dropped_spans"], 0);
  int batches = 0;
  int waits = 0;
  for (const auto& event : json["traceEvents"]) {
    if (event["ph"] == "M") {
      EXPECT_EQ(event["args"]["name"], "weft-engine");
    }
    if (event["name"] == "train batch") ++batches;
    if (event["name"] == "wait for work") ++waits;
  }
  EXPECT_EQ(batches, 3);
  EXPECT_GE(waits, 3);
}

TEST_F(ProfileTest, EndsAfterItsTimeAlsoWithoutWork) {
  StartReadyServer();
  std::string trace;
  const grpc::Status status = Profile(/*steps=*/0, /*seconds=*/0.3, &trace);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(trace, testing::HasSubstr("wait for work"));
}

TEST_F(ProfileTest, OneRunsAtATimeAndACancelledOneEnds) {
  StartReadyServer();
  grpc::ClientContext first;
  const auto request = Make<v1::ProfileRequest>("seconds = 300");
  const auto reader = server_->Profile(&first, request);
  WaitUntilOneRuns();
  std::string trace;
  EXPECT_EQ(Profile(0, 0.001, &trace).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  first.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return Profile(0, 0.001, &trace).ok(); }));
}

TEST_F(ProfileTest, ADrainEndsIt) {
  StartReadyServer();
  std::string trace;
  grpc::Status status;
  std::thread profile([&] { status = Profile(0, 300, &trace); });
  WaitUntilOneRuns();
  EXPECT_TRUE(Send(v1::DrainRequest()).ok());
  profile.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_FALSE(trace.empty());
}

TEST_F(ProfileTest, RefusesWhatItCannotBe) {
  StartReadyServer();
  std::string trace;
  for (const double seconds :
       {-1.0, 300.5, std::numeric_limits<double>::quiet_NaN(),
        std::numeric_limits<double>::infinity()}) {
    const grpc::Status status = Profile(0, seconds, &trace);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), testing::StartsWith("seconds"));
  }
  const grpc::Status status = Profile(100001, 1, &trace);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), testing::StartsWith("steps"));
}

TEST_F(ProfileTest, TheServersInfoHasItsLoad) {
  StartReadyServer();
  const auto response = Answer<v1::GetInfoResponse>(v1::GetInfoRequest());
  const v1::ServerLoad& load = response.info().load();
  EXPECT_GT(load.uptime_seconds(), 0);
  EXPECT_EQ(load.calls_in_flight(), 1u);
  EXPECT_GT(load.process_bytes(), 1000000u);
}

TEST_F(ProfileTest, MetricsNameTheModelAndCountMessages) {
  StartReadyServer();
  EXPECT_EQ(
      MetricValue("weft_model_info{architecture=\"canned\",device=\"cpu\","
                  "dtype=\"f32\",model=\"toy\"}"),
      1);
  EXPECT_GT(MetricValue("weft_startup_seconds"), 0);
  Step();
  const std::string labels =
      "{grpc_method=\"ForwardBackward\",grpc_service=\"weft.v1."
      "TrainingService\""
      ",grpc_type=\"unary\"}";
  EXPECT_EQ(MetricValue("grpc_server_msg_received_total" + labels), 1);
  EXPECT_EQ(MetricValue("grpc_server_msg_sent_total" + labels), 1);
  v1::ForwardBackwardRequest bad = GoodStep();
  bad.set_adapter_id("nobody");
  EXPECT_FALSE(Send(bad).ok());
  EXPECT_EQ(MetricValue("grpc_server_msg_received_total" + labels), 2);
  EXPECT_EQ(MetricValue("grpc_server_msg_sent_total" + labels), 1);
}

}  // namespace
}  // namespace weft::server
