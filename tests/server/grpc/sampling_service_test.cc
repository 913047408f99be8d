#include <chrono>
#include <map>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "server/wire/request_fields.h"
#include "src/base/reason.h"
#include "tests/server/server_fixture.h"
#include "tests/support/status_matchers.h"

namespace weft::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

v1::SampleRequest GoodPrompt() {
  return Make<v1::SampleRequest>(
      "adapter_id = 'a'; prompt = [1, 2, 3]; config.seed = 10; "
      "config.max_tokens = 3");
}

// Returns the same request for a stream, with changes.
v1::SampleStreamRequest GoodStream(absl::string_view changes = "") {
  v1::SampleStreamRequest request;
  *request.mutable_request() = Edited(GoodPrompt(), changes);
  return request;
}

class SamplingServiceTest : public ServerTest {
 protected:
  void SetUp() override { StartReadyServer(); }
};

TEST_F(SamplingServiceTest, SampleReturnsEverySample) {
  const v1::SampleRequest request = Edited(
      GoodPrompt(),
      "num_samples = 2; prompt_logprobs = true; prompt_top_logprobs = 1; "
      "top_logprobs = 2");
  const auto response = Answer<v1::SampleResponse>(request);
  ASSERT_EQ(response.samples_size(), 2);
  EXPECT_THAT(response.samples(0).tokens(), ElementsAre(4, 5, 6));
  EXPECT_THAT(response.samples(1).tokens(), ElementsAre(5, 6, 7));
  EXPECT_THAT(response.samples(0).logprobs(), SizeIs(3));
  EXPECT_THAT(response.samples(0).top_logprobs(), SizeIs(3));
  EXPECT_THAT(response.samples(0).top_logprobs(0).tokens(), ElementsAre(4, 4));
  EXPECT_EQ(response.samples(0).finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_THAT(response.prompt_logprobs(), ElementsAre(0, -1, -1));
  ASSERT_THAT(response.prompt_top_logprobs(), SizeIs(3));
  EXPECT_THAT(response.prompt_top_logprobs(0).tokens(), IsEmpty());
  EXPECT_THAT(response.prompt_top_logprobs(1).tokens(), ElementsAre(2));
  EXPECT_THAT(response.prompt_top_logprobs(2).tokens(), ElementsAre(3));
  EXPECT_THAT(response.prompt_top_logprobs(2).logprobs(), ElementsAre(-1));
  EXPECT_EQ(response.version(), 1u);
}

TEST_F(SamplingServiceTest, SamplesInFlightNameTheVersions) {
  const v1::SampleRequest request =
      Edited(GoodPrompt(), "in_flight = true; recompute_cache = true");
  const auto response = Answer<v1::SampleResponse>(request);
  EXPECT_TRUE(engine_.seen().last_sample.in_flight);
  EXPECT_TRUE(engine_.seen().last_sample.recompute_cache);
  ASSERT_THAT(response.samples(0).version_spans(), SizeIs(2));
  EXPECT_EQ(response.samples(0).version_spans(0).version(), 1u);
  EXPECT_EQ(response.samples(0).version_spans(0).tokens(), 1u);
  EXPECT_EQ(response.samples(0).version_spans(1).version(), 2u);
  EXPECT_EQ(response.samples(0).version_spans(1).tokens(), 2u);
}

// Messages that wait for the client are joined.
TEST_F(SamplingServiceTest, EachMessageOfAStreamHasItsVersions) {
  constexpr int kTokens = 3000;
  engine_.mutable_info()->context_length = 2 * kTokens;
  v1::SampleStreamRequest request = GoodStream();
  request.mutable_request()->set_in_flight(true);
  request.mutable_request()->mutable_config()->set_max_tokens(kTokens);
  grpc::ClientContext context;
  const auto stream = sampling_->SampleStream(&context, request);
  std::vector<uint32_t> tokens = {0, 0, 0};
  int messages = 0;
  v1::SampleStreamResponse message;
  while (stream->Read(&message)) {
    ++messages;
    ASSERT_THAT(message.version_spans(),
                SizeIs(tokens[1] == 0 && message.tokens_size() > 1 ? 2 : 1));
    uint32_t sum = 0;
    for (const v1::VersionSpan& span : message.version_spans()) {
      tokens.at(span.version()) += span.tokens();
      sum += span.tokens();
    }
    EXPECT_EQ(static_cast<int>(sum), message.tokens_size());
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_THAT(tokens, ElementsAre(0, 1, kTokens - 1));
  EXPECT_LT(messages, kTokens);
}

TEST_F(SamplingServiceTest, FillsInDefaults) {
  const auto request = Make<v1::SampleRequest>("prompt += 5");
  auto response = Answer<v1::SampleResponse>(request);
  const SampleRequest seen = engine_.seen().last_sample;
  // The default is 128, but a context of 32 has room for only 31 after the
  // prompt.
  EXPECT_EQ(seen.config.max_tokens, 31);
  EXPECT_EQ(seen.num_samples, 1);
  EXPECT_EQ(seen.config.temperature, 1.0);
  EXPECT_EQ(seen.config.top_p, 1.0);
  EXPECT_EQ(seen.config.top_k, 0);
  EXPECT_FALSE(seen.config.stop.ignore_eos);
  EXPECT_EQ(response.version(), 0u);
  ASSERT_TRUE(Send(request, &response).ok());
  EXPECT_NE(engine_.seen().last_sample.config.seed, seen.config.seed);
}

TEST_F(SamplingServiceTest, AStopRuleMayLeaveOutTheEndOfSequence) {
  const v1::SampleRequest request =
      Edited(GoodPrompt(), "config.stop.ignore_eos = true");
  ASSERT_TRUE(Send(request).ok());
  EXPECT_TRUE(engine_.seen().last_sample.config.stop.ignore_eos);
}

TEST_F(SamplingServiceTest, StopRulesAndTruncationReachTheEngine) {
  engine_.mutable_info()->has_byte_decoder = true;
  const v1::SampleRequest request =
      Edited(GoodPrompt(),
             "config.top_k = 4000000000; config.temperature = 0; "
             "config.stop = {token_ids: 7 token_sequences: {tokens: 8} "
             "byte_strings: '\\n\\n'}");
  ASSERT_TRUE(Send(request).ok());
  const SamplingConfig seen = engine_.seen().last_sample.config;
  EXPECT_EQ(seen.top_k, 100);
  EXPECT_EQ(seen.temperature, 0);
  EXPECT_FALSE(seen.stop.ignore_eos);
  EXPECT_THAT(seen.stop.token_ids, ElementsAre(7));
  EXPECT_THAT(seen.stop.token_sequences, ElementsAre(ElementsAre(8)));
  EXPECT_THAT(seen.stop.byte_strings, ElementsAre("\n\n"));
}

TEST_F(SamplingServiceTest, ARecordNeedsExpertsAndSupports) {
  v1::SampleRequest request = GoodPrompt();
  request.set_record(true);
  const auto sample = [&] {
    const grpc::Status status = Send(request);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return engine_.seen().last_sample;
  };
  const SampleRequest plain = sample();
  EXPECT_THAT(plain.record, SizeIs(32));
  EXPECT_NE(sample().record, plain.record);
  // A dense model without truncation needs neither.
  EXPECT_FALSE(plain.return_routing || plain.return_support);
  EXPECT_FALSE(plain.truncated_logprobs);
  request.mutable_config()->set_top_p(0.9);
  const SampleRequest truncated = sample();
  EXPECT_TRUE(truncated.return_support && truncated.hide_support);
  EXPECT_TRUE(truncated.truncated_logprobs);
  request.set_truncated_logprobs(true);
  request.set_return_support(true);
  EXPECT_FALSE(sample().hide_support);
  request.mutable_config()->set_temperature(0);
  request.clear_truncated_logprobs();
  request.clear_return_support();
  EXPECT_FALSE(sample().return_support);
  request.clear_record();
  EXPECT_THAT(sample().record, IsEmpty());

  RequestLimits limits{.vocab_size = 100,
                       .context_length = 32,
                       .expert_layers = 2,
                       .keeps_sample_records = true,
                       .max_samples = 1};
  request.set_record(true);
  SampleRequest routed = *Validate(request, limits);
  EXPECT_TRUE(routed.return_routing && routed.hide_routing);
  request.set_return_routing(true);
  EXPECT_FALSE(Validate(request, limits)->hide_routing);
  request.set_adapter_id("a");
  request.clear_snapshot();
  request.set_in_flight(true);
  EXPECT_THAT(Validate(request, limits), IsOk());
  request.set_recompute_cache(true);
  EXPECT_THAT(Validate(request, limits),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "record must not be set with recompute_cache"));
  limits.expert_layers = 0;
  request.clear_return_routing();
  EXPECT_THAT(Validate(request, limits), IsOk());
  limits.keeps_sample_records = false;
  const absl::Status refused = Validate(request, limits).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("--sample-record-bytes is 0"));
}

TEST_F(SamplingServiceTest, ChangesOfLogitsReachTheEngine) {
  const v1::SampleRequest request =
      Edited(GoodPrompt(),
             "config.min_p = 0.25; config.repetition_penalty = 1.5; "
             "config.presence_penalty = -2; config.frequency_penalty = 0.5; "
             "config.logit_bias = {token: 9 bias: -100}; "
             "config.allowed_token_ids = 4; config.min_tokens = 3");
  ASSERT_TRUE(Send(request).ok());
  const SamplingConfig seen = engine_.seen().last_sample.config;
  EXPECT_EQ(seen.min_p, 0.25);
  EXPECT_EQ(seen.repetition_penalty, 1.5F);
  EXPECT_EQ(seen.presence_penalty, -2);
  EXPECT_EQ(seen.frequency_penalty, 0.5F);
  EXPECT_THAT(seen.logit_bias, ElementsAre(std::pair(9, -100.0F)));
  EXPECT_THAT(seen.allowed_token_ids, ElementsAre(4));
  EXPECT_EQ(seen.min_tokens, 3);
}

TEST(SampleFieldsTest, SharedChangesOfLogitsCountOnceAndOwnOnesForEverySample) {
  SampleRequest request{.prompt = {1, 2, 3}, .num_samples = 4};
  request.config.max_tokens = 5;
  EXPECT_EQ(FieldsOf(&request).edit_bytes, 0);
  EXPECT_EQ(FieldsOf(&request).vocab_tables, 0);
  request.config.min_p = 0.1;
  EXPECT_EQ(FieldsOf(&request).edit_bytes, 0);
  request.config.logit_bias = {{1, 1.0F}};
  EXPECT_EQ(FieldsOf(&request).edit_bytes, 64);
  request.config.presence_penalty = 1;
  EXPECT_EQ(FieldsOf(&request).edit_bytes, 64 + 4 * 5 * 160);
  request.config.repetition_penalty = 2;
  EXPECT_EQ(FieldsOf(&request).edit_bytes, (1 + 3) * 64 + 4 * 5 * 160);
  request.config.min_tokens = 1;
  EXPECT_EQ(FieldsOf(&request).vocab_tables, 2);
}

TEST(SampleFieldsTest, ATokenInFlightMayHaveAVersionOfItsOwn) {
  SampleRequest request{.prompt = {1, 2, 3}, .num_samples = 4};
  request.config.max_tokens = 5;
  EXPECT_EQ(FieldsOf(&request).token_bytes, 4 * 5 * 16);
  request.in_flight = true;
  EXPECT_EQ(FieldsOf(&request).token_bytes, 4 * 5 * (16 + 96));
}

TEST_F(SamplingServiceTest, StreamAddsUpToTheSamples) {
  const v1::SampleStreamRequest request = GoodStream(
      "num_samples = 3; prompt_logprobs = true; prompt_top_logprobs = 1; "
      "top_logprobs = 1");
  grpc::ClientContext context;
  const auto stream = sampling_->SampleStream(&context, request);
  std::map<uint32_t, std::vector<uint32_t>> tokens;
  std::map<uint32_t, v1::FinishReason> reasons;
  size_t prompt_logprobs = 0;
  int prompt_top = 0;
  v1::SampleStreamResponse message;
  while (stream->Read(&message)) {
    EXPECT_EQ(message.tokens_size(), message.logprobs_size());
    EXPECT_EQ(message.tokens_size(), message.top_logprobs_size());
    auto& all = tokens[message.sample_index()];
    all.insert(all.end(), message.tokens().begin(), message.tokens().end());
    reasons[message.sample_index()] = message.finish_reason();
    prompt_logprobs += static_cast<size_t>(message.prompt_logprobs_size());
    prompt_top += message.prompt_top_logprobs_size();
    EXPECT_EQ(message.version(), 1u);
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(prompt_logprobs, 3u);
  EXPECT_EQ(prompt_top, 3);
  ASSERT_THAT(tokens, SizeIs(3));
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_THAT(tokens[i], ElementsAre(4 + i, 5 + i, 6 + i));
    EXPECT_EQ(reasons[i], v1::FINISH_REASON_LENGTH);
  }
}

TEST_F(SamplingServiceTest, StreamRefusesLikeSample) {
  grpc::ClientContext context;
  const auto stream =
      sampling_->SampleStream(&context, v1::SampleStreamRequest());
  v1::SampleStreamResponse message;
  EXPECT_FALSE(stream->Read(&message));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(),
            "prompt has 0 values, must be in [1, context length 32)");
}

TEST_F(SamplingServiceTest, StreamPassesTheEnginesError) {
  engine_.FailNext(WithReason(absl::ResourceExhaustedError("the share is used"),
                              {.name = "SHARE_IN_USE", .values = {}}));
  const v1::SampleStreamRequest request = GoodStream();
  grpc::ClientContext context;
  const auto stream = sampling_->SampleStream(&context, request);
  v1::SampleStreamResponse message;
  EXPECT_FALSE(stream->Read(&message));
  EXPECT_EQ(stream->Finish().error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Trailer(context, "grpc-retry-pushback-ms"), "1000");
}

TEST_F(SamplingServiceTest, CancelledStreamFreesThePlace) {
  engine_.Hold();
  const v1::SampleStreamRequest request = GoodStream();
  grpc::ClientContext context;
  const auto stream = sampling_->SampleStream(&context, request);
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_waiting == 1; }));
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_cancelled == 1; }));
}

TEST_F(SamplingServiceTest, StreamEndsAtItsDeadline) {
  engine_.Hold();
  const v1::SampleStreamRequest request = GoodStream();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(100));
  const auto stream = sampling_->SampleStream(&context, request);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_cancelled == 1; }));
}

TEST_F(SamplingServiceTest, ReaderTooFarBehindIsCancelled) {
  engine_.mutable_info()->context_length = 10000000;
  const v1::SampleStreamRequest request =
      GoodStream("config.max_tokens = 200000; top_logprobs = 20");
  grpc::ClientContext context;
  engine_.Hold();
  const auto stream = sampling_->SampleStream(&context, request);
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_waiting == 1; }));
  engine_.Release();
  EXPECT_TRUE(
      Eventually([&] { return MetricValue("weft_requests_inflight") == 0; }));
  v1::SampleStreamResponse message;
  while (stream->Read(&message)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

}  // namespace
}  // namespace weft::server
