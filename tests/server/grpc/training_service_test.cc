#include <chrono>
#include <thread>

#include "gmock/gmock.h"
#include "src/base/reason.h"
#include "tests/server/server_fixture.h"

namespace weft::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TrainingServiceTest : public ServerTest {
 protected:
  void SetUp() override { StartReadyServer(); }
};

TEST_F(TrainingServiceTest, ForwardBackwardReturnsLogprobsLossesAndMetrics) {
  const v1::ForwardBackwardRequest request =
      Edited(GoodStep(),
             "data[0].weights += 1; data[0].weights += 0; "
             "data[0].weights += -2; loss.return_entropy = true");
  grpc::ClientContext context;
  v1::ForwardBackwardResponse response;
  const grpc::Status status = Send(request, &response, &context);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.results_size(), 1);
  EXPECT_THAT(Floats(response.results(0).logprobs_le()),
              ElementsAre(-3.0 / 8, 0, -5.0 / 8));
  EXPECT_THAT(Floats(response.results(0).losses_le()),
              ElementsAre(3.0 / 8, 0, -10.0 / 8));
  EXPECT_THAT(Floats(response.results(0).entropies_le()),
              ElementsAre(0.5, 0.5, 0.5));
  EXPECT_DOUBLE_EQ(response.metrics().at("loss:sum"), -7.0 / 8);
  EXPECT_EQ(response.step(), 1u);
  EXPECT_EQ(Trailer(context, "weft-replayed"), "");
}

TEST_F(TrainingServiceTest, RawAndPackedFormsMakeTheSameRequest) {
  v1::ForwardBackwardRequest packed = Edited(
      GoodStep(), "loss.function = LOSS_FUNCTION_PPO; loss.clip_low = 0.5");
  v1::ForwardBackwardRequest raw = packed;
  Edit(&packed,
       "data[0].weights = [0.5, 0, 2]; data[0].advantages = [-0.5, -0, -2]; "
       "data[0].logprobs = [-0.5, -0, -2]");
  v1::Datum* const raw_datum = raw.mutable_data(0);
  raw_datum->Clear();
  raw_datum->set_tokens_le(Raw<uint32_t>({1, 2, 3}));
  raw_datum->set_targets_le(Raw<uint32_t>({2, 3, 4}));
  raw_datum->set_weights_le(Raw<float>({0.5, 0, 2}));
  raw_datum->set_advantages_le(Raw<float>({-0.5, 0, -2}));
  raw_datum->set_logprobs_le(Raw<float>({-0.5, 0, -2}));
  ASSERT_TRUE(Send(packed).ok());
  const TrainRequest seen = engine_.seen().last_train;
  ASSERT_TRUE(Send(raw).ok());
  EXPECT_EQ(engine_.seen().last_train.data, seen.data);
  EXPECT_EQ(engine_.seen().last_train.loss, seen.loss);
  EXPECT_TRUE(seen.backward);
  EXPECT_EQ(seen.loss.clip_low, 0.5);
  EXPECT_EQ(seen.loss.clip_high, 1.2);
  EXPECT_EQ(seen.deadline, absl::InfiniteFuture());
}

TEST_F(TrainingServiceTest, WhatRecordsGiveIsChargedFirst) {
  const v1::ForwardBackwardRequest request =
      Edited(GoodStep(),
             "loss.replay_support = true; data[0].sampled_spans = "
             "{sequence_id: 'record:1' offset: 2 length: 3}");
  ASSERT_TRUE(Send(request).ok());
  const TrainRequest seen = engine_.seen().last_train;
  const SampledSpan expected{
      .sequence_id = "record:1", .offset = 2, .length = 3};
  ASSERT_EQ(seen.replay.spans.size(), 1);
  EXPECT_THAT(seen.replay.spans[0], ElementsAre(expected));
  EXPECT_TRUE(seen.replay.support && !seen.replay.logprobs);
  engine_.SetReplayBytes(int64_t{1} << 50);
  const grpc::Status refused = Send(request);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("takes 11258999"));
}

TEST_F(TrainingServiceTest, ForwardOnTheBaseModelHasNoStep) {
  v1::ForwardRequest request;
  *request.mutable_data() = GoodStep().data();
  *request.mutable_loss() = GoodStep().loss();
  const auto response = Answer<v1::ForwardResponse>(request);
  EXPECT_EQ(response.step(), 0u);
  EXPECT_EQ(response.results_size(), 1);
  EXPECT_FALSE(engine_.seen().last_train.backward);
}

TEST_F(TrainingServiceTest, CrossEntropyIgnoresPolicyInputs) {
  v1::ForwardBackwardRequest request = GoodStep();
  request.mutable_data(0)->add_advantages(1);
  EXPECT_TRUE(Send(request).ok());
  EXPECT_TRUE(engine_.seen().last_train.data[0].advantages.empty());
}

TEST_F(TrainingServiceTest, SoftTargetsKeepTheirShape) {
  const v1::ForwardBackwardRequest request =
      Edited(GoodStep(),
             "data[0].targets_per_token = 2; data[0].targets += [7, 8, 9]");
  const auto response = Answer<v1::ForwardBackwardResponse>(request);
  EXPECT_EQ(engine_.seen().last_train.data[0].targets_per_token, 2);
  EXPECT_EQ(Floats(response.results(0).logprobs_le()).size(), 6u);
}

TEST_F(TrainingServiceTest, RaggedTargetsAreFlatInBothForms) {
  v1::ForwardBackwardRequest raw = Edited(GoodStep(), "data[0].targets += 9");
  const v1::ForwardBackwardRequest packed =
      Edited(raw, "data[0].target_offsets = [0, 3, 3, 4]");
  raw.mutable_data(0)->set_target_offsets_le(Raw<uint32_t>({0, 3, 3, 4}));
  for (const v1::ForwardBackwardRequest& request : {packed, raw}) {
    const auto response = Answer<v1::ForwardBackwardResponse>(request);
    EXPECT_THAT(engine_.seen().last_train.data[0].target_offsets,
                ElementsAre(0, 3, 3, 4));
    EXPECT_THAT(Floats(response.results(0).logprobs_le()),
                ElementsAre(-3.0 / 8, -4.0 / 8, -5.0 / 8, -10.0 / 8));
    EXPECT_EQ(Floats(response.results(0).losses_le()).size(), 4u);
  }
}

// No token has a target, so the result has no log-probabilities.
TEST_F(TrainingServiceTest, RaggedTargetsMayBeNone) {
  const v1::ForwardBackwardRequest request = Edited(
      GoodStep(), "clear data[0].targets; data[0].target_offsets = 0 * 4");
  const auto response = Answer<v1::ForwardBackwardResponse>(request);
  EXPECT_TRUE(response.results(0).logprobs_le().empty());
}

TEST_F(TrainingServiceTest, OptimStepFillsInDefaults) {
  auto request = Make<v1::OptimStepRequest>(
      "adapter_id = 'a'; adamw.learning_rate = 0; adamw.max_grad_norm = 1");
  auto response = Answer<v1::OptimStepResponse>(request);
  EXPECT_EQ(response.grad_norm(), 2.5);
  EXPECT_EQ(response.version(), 2u);
  EXPECT_EQ(response.step(), 1u);
  EXPECT_EQ(engine_.seen().last_optim.adamw,
            (AdamWConfig{.learning_rate = 0, .max_grad_norm = 1}));
  EXPECT_FALSE(engine_.seen().last_optim.muon.has_value());
  request.clear_adamw();
  request.mutable_muon()->set_momentum(0.5);
  request.mutable_muon()->set_nesterov(false);
  ASSERT_TRUE(Send(request, &response).ok());
  EXPECT_EQ(engine_.seen().last_optim.muon,
            (MuonConfig{.momentum = 0.5, .nesterov = false}));
}

TEST_F(TrainingServiceTest, AGradientMayBeDiscarded) {
  ASSERT_TRUE(Send(GoodStep()).ok());
  const auto left = [this] {
    return Answer<v1::GetAdapterResponse>(
               Make<v1::GetAdapterRequest>("adapter_id = 'a'"))
        .adapter()
        .accumulated_tokens();
  };
  EXPECT_EQ(left(), 3U);
  const auto response = Answer<v1::OptimStepResponse>(
      Make<v1::OptimStepRequest>("adapter_id = 'a'; discard = true"));
  EXPECT_EQ(response.accumulated_tokens(), 3U);
  EXPECT_EQ(response.version(), 1U);
  EXPECT_EQ(left(), 0U);
}

TEST_F(TrainingServiceTest, AReportBecomesACurve) {
  (void)Answer<v1::ReportMetricsResponse>(Make<v1::ReportMetricsRequest>(
      "adapter_id = 'a'; metrics += {key: 'reward', value: 0.5}"));
  const Activity activity =
      engine_.activity({.adapter_ids = {"a"}, .max_points = 1});
  ASSERT_EQ(activity.adapters[0].curves.size(), 1U);
  EXPECT_EQ(activity.adapters[0].curves[0].name, "reward");
  EXPECT_EQ(Send(Make<v1::ReportMetricsRequest>(
                     "adapter_id = 'x'; metrics += {key: 'loss', value: 1}"))
                .error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(TrainingServiceTest, RepeatedStepIsMarkedReplayed) {
  v1::ForwardBackwardRequest request = GoodStep();
  request.set_step(1);
  v1::ForwardBackwardResponse first;
  v1::ForwardBackwardResponse again;
  grpc::ClientContext first_context;
  grpc::ClientContext again_context;
  ASSERT_TRUE(Send(request, &first, &first_context).ok());
  ASSERT_TRUE(Send(request, &again, &again_context).ok());
  EXPECT_EQ(Trailer(first_context, "weft-replayed"), "");
  EXPECT_EQ(Trailer(again_context, "weft-replayed"), "1");
  EXPECT_EQ(first.results(0).losses_le(), again.results(0).losses_le());
  EXPECT_EQ(
      MetricValue("weft_replayed_requests_total{method=\"ForwardBackward\"}"),
      1);
}

TEST_F(TrainingServiceTest, DeadlineReachesTheEngineAndFreesThePlace) {
  engine_.Hold();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(200));
  const grpc::Status status = Send(GoodStep(), nullptr, &context);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_LT(engine_.seen().last_train.deadline, absl::Now() + absl::Seconds(1));
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_cancelled == 1; }));
  EXPECT_EQ(engine_.seen().num_waiting, 0u);
}

TEST_F(TrainingServiceTest, ClientCancellationFreesThePlace) {
  engine_.Hold();
  grpc::ClientContext context;
  grpc::Status status;
  std::thread caller([&] { status = Send(GoodStep(), nullptr, &context); });
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_waiting == 1; }));
  context.TryCancel();
  caller.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_cancelled == 1; }));
  EXPECT_TRUE(
      Eventually([&] { return MetricValue("weft_requests_inflight") == 0; }));
}

TEST_F(TrainingServiceTest, AFullShareCarriesARetryHint) {
  engine_.FailNext(WithReason(absl::ResourceExhaustedError("the share is used"),
                              {.name = "SHARE_IN_USE", .values = {}}));
  grpc::ClientContext context;
  const grpc::Status status = Send(GoodStep(), nullptr, &context);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(status.error_message(), "the share is used");
  EXPECT_EQ(Trailer(context, "grpc-retry-pushback-ms"), "1000");
  EXPECT_EQ(MetricValue("weft_requests_rejected_total{reason=\"quota\"}"), 1);
}

TEST_F(TrainingServiceTest, RefusalsAreCountedByReason) {
  const std::map<std::string, std::string> counted = {
      {"CALLS_UNDER_WAY", "quota"},
      {"TOKEN_RATE", "quota"},
      {"ALL_ADAPTER_SLOTS_IN_USE", "adapter_room"},
      {"ADAPTER_BYTES", "adapter_room"},
      {"STATE_DISK_FULL", "disk_full"},
      {"STATE_STORE_UNREACHABLE", "store_unreachable"},
      {"CHECKPOINT_DISK_FULL", "disk_full"},
      {"CHECKPOINT_STORE_UNREACHABLE", "store_unreachable"},
      {"TOO_LARGE", "too_large"},
      {"OUT_OF_MEMORY", "no_room"}};
  for (const auto& [reason, label] : counted) {
    const std::string series =
        absl::StrCat("weft_requests_rejected_total{reason=\"", label, "\"}");
    const double before = MetricValue(series);
    const auto code = reason == "STATE_STORE_UNREACHABLE"
                          ? absl::StatusCode::kUnavailable
                          : absl::StatusCode::kResourceExhausted;
    engine_.FailNext(
        WithReason(absl::Status(code, "why"), {.name = reason, .values = {}}));
    EXPECT_FALSE(Send(GoodStep()).ok());
    EXPECT_EQ(MetricValue(series), before + 1) << reason;
  }
}

TEST_F(TrainingServiceTest, EngineErrorsKeepTheirCodes) {
  for (int code = 1; code <= 16; ++code) {
    engine_.FailNext(absl::Status(static_cast<absl::StatusCode>(code), "why"));
    const grpc::Status status = Send(GoodStep());
    EXPECT_EQ(static_cast<int>(status.error_code()), code);
    EXPECT_EQ(status.error_message(), "why");
  }
}

TEST_F(TrainingServiceTest, MessageAboveTheLimitIsRefusedAndServerLives) {
  v1::ForwardBackwardRequest request = GoodStep();
  request.mutable_data(0)->set_tokens_le(std::string(5 << 20, 'x'));
  EXPECT_EQ(Send(request).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Send(GoodStep()).ok());
}

TEST_F(TrainingServiceTest, CompressedMessagesAreRefused) {
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  v1::ForwardBackwardRequest request = GoodStep();
  request.mutable_data(0)->set_weights_le(std::string(1 << 20, '\0'));
  EXPECT_EQ(Send(request, nullptr, &context).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace weft::server
