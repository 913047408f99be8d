// Tests the id of a request: from its headers to its log lines and its trailer.
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "src/base/observe/log.h"
#include "tests/server/server_fixture.h"

namespace weft::server {
namespace {

constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";

class TraceTest : public ServerTest {
 protected:
  void SetUp() override {
    SetLogLevel(LogLevel::kDebug);
    ASSERT_NO_FATAL_FAILURE(StartReadyServer());
    testing::internal::CaptureStderr();
  }
  void TearDown() override { SetLogLevel(LogLevel::kInfo); }

  // Trains a step with these headers. Returns the id in the trailer.
  std::string Step(
      const std::vector<std::pair<std::string, std::string>>& headers,
      const std::string& adapter = "a") {
    grpc::ClientContext context;
    for (const auto& [name, value] : headers) context.AddMetadata(name, value);
    v1::ForwardBackwardRequest request = GoodStep();
    request.set_adapter_id(adapter);
    v1::ForwardBackwardResponse response;
    const grpc::Status status =
        training_->ForwardBackward(&context, request, &response);
    EXPECT_EQ(status.ok(), adapter == "a") << status.error_message();
    return Trailer(context, "weft-trace-id");
  }

  // Ends the server, then returns the lines that it logged about calls.
  std::vector<std::string> CallLines() {
    listeners_.reset();
    std::vector<std::string> lines;
    const std::string log = testing::internal::GetCapturedStderr();
    for (const absl::string_view line : absl::StrSplit(log, '\n')) {
      if (absl::StrContains(line, " rpc rpc=")) lines.emplace_back(line);
    }
    return lines;
  }
};

TEST_F(TraceTest, ACallKeepsTheTraceOfItsHeadersInTrailerAndLog) {
  EXPECT_EQ(Step({{"traceparent",
                   absl::StrCat("00-", kTrace, "-00f067aa0ba902b7-01")}}),
            kTrace);
  EXPECT_EQ(Step({{"x-request-id", "run-7"}}), "run-7");
  const std::string made = Step({});
  EXPECT_THAT(made, testing::MatchesRegex("[0-9a-f]+"));
  const std::vector<std::string> lines = CallLines();
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_THAT(lines[0], testing::EndsWith(absl::StrCat(" trace_id=", kTrace)));
  EXPECT_THAT(lines[1], testing::EndsWith(" trace_id=run-7"));
  EXPECT_THAT(lines[2], testing::EndsWith(absl::StrCat(" trace_id=", made)));
}

TEST_F(TraceTest, ARefusedCallHasItsIdToo) {
  EXPECT_EQ(Step({{"x-request-id", "run-8"}}, "nobody"), "run-8");
  const std::vector<std::string> lines = CallLines();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], testing::HasSubstr("code=NOT_FOUND"));
  EXPECT_THAT(lines[0], testing::EndsWith(" trace_id=run-8"));
}

TEST_F(TraceTest, LogLinesHoldNoTokensAndNoCredentials) {
  // The log must not contain these values from the headers and the request.
  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer weft_secret");
  context.AddMetadata("x-request-id", "weft secret");
  auto request = Make<v1::SampleRequest>("adapter_id = 'a'");
  for (const uint32_t token : {71, 72, 73}) request.add_prompt(token);
  request.mutable_config()->set_max_tokens(2);
  request.mutable_config()->mutable_stop()->add_byte_strings("stop-word");
  v1::SampleResponse response;
  (void)sampling_->Sample(&context, request, &response);
  const std::vector<std::string> lines = CallLines();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], testing::Not(testing::HasSubstr("secret")));
  EXPECT_THAT(lines[0], testing::Not(testing::HasSubstr("stop-word")));
  EXPECT_THAT(lines[0], testing::Not(testing::ContainsRegex("71[^0-9]+72")));
}

}  // namespace
}  // namespace weft::server
