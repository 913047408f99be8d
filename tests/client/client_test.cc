#include "client/weft_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/canned_server.h"
#include "tests/support/temp_folder.h"

namespace weft::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr char kTrain[] = "ForwardBackward";

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() : client_(Client::Connect(FastOptions()).value()) {}

  ClientOptions FastOptions() const {
    ClientOptions options;
    options.target = server_.target();
    options.timeout = absl::Seconds(20);
    options.retry = {.max_attempts = 4,
                     .initial_delay = absl::Milliseconds(5),
                     .max_delay = absl::Milliseconds(20)};
    return options;
  }

  std::unique_ptr<AdapterHandle> Create() {
    return client_->CreateAdapter("a").value();
  }

  static Future<TrainReply> Train(AdapterHandle& adapter) {
    v1::LossConfig loss;
    loss.set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
    return adapter.ForwardBackward({*NextTokenDatum({1, 2, 3})}, loss);
  }

  CannedServer server_;
  std::unique_ptr<Client> client_;
};

TEST(NextTokenDatumTest, MasksThePrompt) {
  const auto datum = NextTokenDatum({5, 6, 7, 8}, 2).value();
  EXPECT_THAT(ReadFloats(datum.weights_le()), ElementsAre(0, 1, 1));
  EXPECT_EQ(datum.tokens_le(), std::string("\5\0\0\0\6\0\0\0\7\0\0\0", 12));
  EXPECT_EQ(datum.targets_le(), std::string("\6\0\0\0\7\0\0\0\10\0\0\0", 12));
}

TEST(NextTokenDatumTest, RefusesWhatCannotBeLearnt) {
  EXPECT_TRUE(absl::IsInvalidArgument(NextTokenDatum({1}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(NextTokenDatum({1, 2}, 3).status()));
}

TEST_F(ClientTest, TrainsWithNumbersFromOne) {
  const auto adapter = Create();
  auto gradient = Train(*adapter);
  auto update = adapter->OptimStep();
  EXPECT_EQ(adapter->next_step(), 3);
  const auto trained = gradient.get().value();
  EXPECT_EQ(trained.message.step(), 1);
  EXPECT_FALSE(trained.replayed);
  EXPECT_EQ(trained.message.metrics().at("loss:sum"), 7.0 / 8);
  const auto updated = update.get().value();
  EXPECT_EQ(updated.message.step(), 2);
}

TEST_F(ClientTest, GoesOnAfterTheLastStepOfAnExistingAdapter) {
  const auto first = Create();
  ASSERT_TRUE(Train(*first).get().ok());
  const auto second = client_->OpenAdapter("a").value();
  EXPECT_EQ(second->next_step(), 2);
  EXPECT_TRUE(absl::IsNotFound(client_->OpenAdapter("b").status()));
}

TEST_F(ClientTest, RepeatsWithTheSameNumberWhenUnavailable) {
  const auto adapter = Create();
  server_.engine().FailNext(absl::UnavailableError("restarting"), kTrain);
  server_.engine().FailNext(absl::UnavailableError("restarting"), kTrain);
  const auto reply = Train(*adapter).get();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_THAT(server_.engine().seen().arrived,
              ElementsAre(Pair("CreateAdapter", 0), Pair(kTrain, 1),
                          Pair(kTrain, 1), Pair(kTrain, 1)));
}

TEST_F(ClientTest, ReplaysAStepWhoseReplyWasLost) {
  const auto adapter = Create();
  server_.wire().LoseReply(kTrain, {grpc::StatusCode::UNAVAILABLE, "lost"});
  const auto reply = Train(*adapter).get().value();
  EXPECT_TRUE(reply.replayed);
  EXPECT_THAT(server_.engine().seen().applied, ElementsAre(Pair(kTrain, 1)));
}

TEST_F(ClientTest, RepeatsWhatGrpcCutsOffAsTheServerEnds) {
  const auto adapter = Create();
  server_.wire().LoseReply(kTrain, {grpc::StatusCode::CANCELLED, "CANCELLED"});
  const auto reply = Train(*adapter).get();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->replayed);
}

TEST_F(ClientTest, RepeatsRequestsOnWholeAdaptersOnlyWithANumber) {
  Create();
  v1::SaveCheckpointRequest save;
  v1::PublishSnapshotRequest publish;
  v1::LoadCheckpointRequest load;
  const auto send = [&](uint64_t first_step, auto expected) {
    const auto call = [&](const char* rpc, auto method, auto& request) {
      request.set_adapter_id("a");
      request.set_name(first_step > 0 ? "y" : "x");
      if (first_step > 0) request.set_step(first_step++);
      server_.wire().LoseReply(rpc, {grpc::StatusCode::UNAVAILABLE, "lost"});
      EXPECT_EQ(((*client_).*method)(request).status().code(), expected) << rpc;
    };
    call("SaveCheckpoint", &Client::SaveCheckpoint, save);
    call("PublishSnapshot", &Client::PublishSnapshot, publish);
    call("LoadCheckpoint", &Client::LoadCheckpoint, load);
  };
  save.set_overwrite(true);
  send(0, absl::StatusCode::kUnavailable);
  send(2, absl::StatusCode::kOk);
  EXPECT_THAT(
      server_.engine().seen().applied,
      ElementsAre(Pair("SaveCheckpoint", 0), Pair("PublishSnapshot", 0),
                  Pair("LoadCheckpoint", 1), Pair("SaveCheckpoint", 2),
                  Pair("PublishSnapshot", 3), Pair("LoadCheckpoint", 4)));
}

TEST_F(ClientTest, RepeatsAFullQueueOnlyWithAHint) {
  const auto adapter = Create();
  server_.wire().SetRetryHint(5);
  server_.engine().FailNext(absl::ResourceExhaustedError("full"));
  EXPECT_TRUE(adapter->OptimStep().get().ok());
  server_.wire().SetRetryHint(std::nullopt);
  server_.engine().FailNext(absl::ResourceExhaustedError("full"));
  const auto reply = adapter->OptimStep().get();
  EXPECT_TRUE(absl::IsResourceExhausted(reply.status()));
  EXPECT_EQ(adapter->next_step(), 2);
}

TEST_F(ClientTest, GivesUpAfterTheAttemptsAndWantsAResync) {
  const auto adapter = Create();
  for (int i = 0; i < 4; ++i) {
    server_.engine().FailNext(absl::UnavailableError("down"), kTrain);
  }
  EXPECT_TRUE(absl::IsUnavailable(Train(*adapter).get().status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(Train(*adapter).get().status()));
  ASSERT_TRUE(adapter->Resync().ok());
  EXPECT_EQ(adapter->next_step(), 1);
  EXPECT_TRUE(Train(*adapter).get().ok());
}

TEST_F(ClientTest, ReportsANumberThatAnotherClientUsed) {
  const auto first = Create();
  const auto second = client_->OpenAdapter("a");
  ASSERT_TRUE(Train(*first).get().ok());
  const auto reply = (*second)->OptimStep().get();
  EXPECT_TRUE(absl::IsAlreadyExists(reply.status())) << reply.status();
  ASSERT_TRUE((*second)->Resync().ok());
  EXPECT_EQ((*second)->next_step(), 2);
}

TEST_F(ClientTest, RunsPipelinedStepsInOrder) {
  const auto adapter = Create();
  server_.engine().Hold();
  std::vector<Future<TrainReply>> gradients;
  std::vector<Future<OptimReply>> updates;
  for (int i = 0; i < 4; ++i) {
    gradients.push_back(Train(*adapter));
    updates.push_back(adapter->OptimStep());
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(adapter->Resync()));
  server_.engine().Release();
  for (auto& gradient : gradients) EXPECT_TRUE(gradient.get().ok());
  for (auto& update : updates) EXPECT_TRUE(update.get().ok());
  std::vector<uint64_t> steps;
  for (const auto& [rpc, step] : server_.engine().seen().applied) {
    steps.push_back(step);
  }
  EXPECT_THAT(steps, ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

// What a call and the request of an OptimStep take on the server.
constexpr int64_t kStepBytes = (96 << 10) + (5 << 10);

// The server has memory for a sixth of the steps under way: the client has half
// of it. The others come again as the hint says.
TEST(FullMemoryTest, StepsOfAllAdaptersAreDone) {
  constexpr int kSteps = 60;
  CannedServer server(/*request_memory_bytes=*/2 * 20 * kStepBytes);
  server.wire().SetRetryHint(100);
  const auto client = Client::Connect({.target = server.target()}).value();
  std::vector<std::unique_ptr<AdapterHandle>> adapters;
  for (const char* name : {"a", "b"}) {
    adapters.push_back(*client->CreateAdapter(name));
  }
  server.engine().Hold();
  std::vector<Future<OptimReply>> updates;
  for (int i = 0; i < kSteps; ++i) {
    for (const auto& adapter : adapters) {
      updates.push_back(adapter->OptimStep());
    }
  }
  server.engine().Release();
  for (auto& update : updates) {
    const auto reply = update.get();
    EXPECT_TRUE(reply.ok()) << reply.status();
  }
}

TEST_F(ClientTest, EndsARefusedStepAtItsDeadline) {
  CannedServer server(/*request_memory_bytes=*/2 * 2 * kStepBytes);
  server.wire().SetRetryHint(100);
  ClientOptions options = FastOptions();
  options.target = server.target();
  options.timeout = absl::Seconds(1);
  const auto client = Client::Connect(options).value();
  const auto adapter = *client->CreateAdapter("a");
  server.engine().Hold();
  std::vector<Future<OptimReply>> updates;
  for (int i = 0; i < 5; ++i) updates.push_back(adapter->OptimStep());
  for (auto& update : updates) EXPECT_FALSE(update.get().ok());
  server.engine().Release();
  EXPECT_TRUE(adapter->Resync().ok());
  EXPECT_TRUE(adapter->OptimStep().get().ok());
}

TEST_F(ClientTest, ScoresBesideTheSteps) {
  const auto adapter = Create();
  v1::LossConfig loss;
  loss.set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
  const v1::Datum datum = *NextTokenDatum({1, 2, 3});
  server_.engine().FailNext(absl::UnavailableError("restarting"), "Forward");
  const auto scored = adapter->Score({datum}, loss).get().value();
  EXPECT_EQ(scored.message.step(), 0);
  EXPECT_EQ(scored.message.metrics().at("loss:sum"), 7.0 / 8);
  EXPECT_EQ(adapter->next_step(), 1);
  EXPECT_TRUE(server_.engine().seen().last_train.unnumbered);
  ASSERT_TRUE(adapter->Score({datum}, loss, "best").get().ok());
  EXPECT_EQ(server_.engine().seen().last_train.snapshot, "best");
  EXPECT_THAT(server_.engine().seen().arrived,
              ElementsAre(Pair("CreateAdapter", 0), Pair("Forward", 0),
                          Pair("Forward", 0), Pair("Forward", 0)));
  EXPECT_EQ(Train(*adapter).get()->message.step(), 1);
}

TEST_F(ClientTest, StepsBehindOneThatFailsGoOn) {
  const auto adapter = Create();
  server_.engine().Hold();
  server_.engine().FailNextRun(absl::InvalidArgumentError("data[0]"), kTrain);
  auto failed = Train(*adapter);
  auto later = adapter->OptimStep();
  server_.engine().Release();
  EXPECT_TRUE(absl::IsInvalidArgument(failed.get().status()));
  EXPECT_TRUE(later.get().ok());
  EXPECT_EQ(adapter->next_step(), 3);
}

TEST_F(ClientTest, WithdrawsTheStepsBehindOneThatIsNotAccepted) {
  const auto adapter = Create();
  // The refusal comes with the second try, when the OptimStep is on its way.
  server_.wire().SetRetryHint(1000);
  server_.engine().FailNext(absl::UnavailableError("busy"), kTrain);
  server_.engine().FailNext(absl::PermissionDeniedError("not you"), kTrain);
  auto refused = Train(*adapter);
  auto later = adapter->OptimStep();
  EXPECT_TRUE(absl::IsPermissionDenied(refused.get().status()));
  const auto withdrawn = later.get();
  EXPECT_TRUE(absl::IsFailedPrecondition(withdrawn.status()));
  EXPECT_THAT(std::string(withdrawn.status().message()), HasSubstr("not you"));
  EXPECT_TRUE(absl::IsFailedPrecondition(Train(*adapter).get().status()));
  ASSERT_TRUE(adapter->Resync().ok());
  EXPECT_EQ(adapter->next_step(), 1);
}

TEST_F(ClientTest, EndsAtTheDeadline) {
  ClientOptions options = FastOptions();
  options.timeout = absl::Seconds(1);
  const auto client = Client::Connect(options).value();
  const auto adapter = client->CreateAdapter("a").value();
  server_.engine().Hold();
  EXPECT_TRUE(absl::IsDeadlineExceeded(adapter->OptimStep().get().status()));
}

TEST_F(ClientTest, FuturesOutliveTheHandleAndTheClient) {
  auto adapter = Create();
  server_.engine().Hold();
  auto gradient = Train(*adapter);
  adapter.reset();
  client_.reset();
  server_.engine().Release();
  EXPECT_TRUE(gradient.get().ok());
}

TEST_F(ClientTest, ListsEveryPage) {
  constexpr int kMoreThanAPage = 101;
  for (int i = 0; i < kMoreThanAPage; ++i) {
    ASSERT_TRUE(client_->CreateAdapter("a" + std::to_string(i)).ok());
  }
  const auto found = client_->ListAdapters().value();
  EXPECT_EQ(found.adapters_size(), kMoreThanAPage);
  EXPECT_TRUE(client_->DeleteAdapter("a0").ok());
  EXPECT_TRUE(absl::IsNotFound(client_->DeleteAdapter("a0")));
}

TEST_F(ClientTest, StreamsUntilToldToStop) {
  v1::SampleRequest request;
  request.add_prompt(1);
  request.mutable_config()->set_max_tokens(3);
  std::vector<uint32_t> tokens;
  const auto keep = [&](const v1::SampleStreamResponse& delta) {
    tokens.insert(tokens.end(), delta.tokens().begin(), delta.tokens().end());
    return true;
  };
  EXPECT_TRUE(client_->SampleStream(request, keep).ok());
  EXPECT_THAT(tokens, ElementsAre(2, 3, 4));
  request.mutable_config()->set_max_tokens(1'000'000);
  const auto stop = [](const v1::SampleStreamResponse&) { return false; };
  EXPECT_TRUE(absl::IsCancelled(client_->SampleStream(request, stop)));
}

TEST_F(ClientTest, NamesTheAdapterOfEachCallInItsMetadata) {
  const auto names = [this](absl::string_view id) {
    return server_.wire().adapter_id() == id;
  };
  auto adapter = Create();
  EXPECT_TRUE(names("a"));
  EXPECT_TRUE(client_->GetInfo().ok() && names(""));
  EXPECT_TRUE(Train(*adapter).get().ok() && names("a"));
  EXPECT_TRUE(client_->ListAdapters().ok() && names(""));
  EXPECT_TRUE(adapter->Resync().ok() && names("a"));

  v1::SampleRequest request;
  request.add_prompt(1);
  request.mutable_config()->set_max_tokens(1);
  const auto keep = [](const v1::SampleStreamResponse&) { return true; };
  EXPECT_TRUE(client_->SampleStream(request, keep).ok() && names(""));
  request.set_adapter_id("a");
  EXPECT_TRUE(client_->SampleStream(request, keep).ok() && names("a"));
  EXPECT_TRUE(client_->GetInfo().ok() && names(""));
  EXPECT_TRUE(client_->Sample(request).ok() && names("a"));
  EXPECT_EQ(server_.wire().checkpoint(), "");
  request.set_checkpoint("c");
  // There is none, but the server has the name.
  EXPECT_TRUE(absl::IsNotFound(client_->Sample(request).status()));
  EXPECT_EQ(server_.wire().checkpoint(), "c");
  EXPECT_TRUE(client_->GetInfo().ok());
  EXPECT_EQ(server_.wire().checkpoint(), "");
  EXPECT_TRUE(absl::IsNotFound(client_->SampleStream(request, keep)));
  EXPECT_EQ(server_.wire().checkpoint(), "c");

  EXPECT_TRUE(client_->GetInfo().ok() && names(""));
  const TempFolder temporary;
  const std::string folder = temporary.path() + "/named";
  EXPECT_TRUE(client_->ExportAdapter("a", "", folder).ok() && names("a"));
  EXPECT_TRUE(client_->ImportAdapter("b", folder).ok() && names("b"));
  // Metadata cannot hold this id. So the server gets the id only in the
  // request's field, and refuses it.
  EXPECT_TRUE(absl::IsInvalidArgument(client_->DeleteAdapter("\xc3\xa4\n")));
  EXPECT_TRUE(names(""));
}

}  // namespace
}  // namespace weft::client
