// Calls the services' handlers from several threads, without a connection, for
// ThreadSanitizer.
#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/message.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "server/call/call.h"
#include "server/grpc/cancel_slot.h"
#include "server/grpc/services.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "tests/support/canned_engine.h"
#include "tests/support/direct_call.h"

namespace weft::server {
namespace {

constexpr int kClients = 4;
constexpr int kRounds = 12;

EngineInfo InfoWithRoom() {
  EngineInfo info = CannedInfo();
  info.max_adapters = 2 * kClients;
  info.context_length = 1 << 16;
  return info;
}

class ServerCallsTest : public ::testing::Test {
 protected:
  ServerCallsTest()
      : core_(ServerOptions(), &registry_),
        services_{MakeTrainingService(&core_), MakeSamplingService(&core_),
                  MakeAdapterService(&core_), MakeServerService(&core_)} {
    SetLogLevel(LogLevel::kError);
    core_.engine.Set(engine_.get());
    core_.begin_drain = [this](Callback<bool> done) {
      core_.engine.SetDraining(true);
      engine_->Drain(std::move(done));
    };
  }
  ~ServerCallsTest() override {
    engine_.reset();  // The engine's reply thread may still hold a call that
                      // has ended.
    EXPECT_EQ(core_.open_calls, 0);
    // No call holds anything any more.
    EXPECT_TRUE(core_.imports->Reserve("", core_.imports->most()).ok());
    EXPECT_TRUE(core_.memory->Reserve("", core_.memory->most()).ok());
  }

  RawService& training() { return *services_[0]; }
  RawService& sampling() { return *services_[1]; }
  RawService& adapters() { return *services_[2]; }
  RawService& server() { return *services_[3]; }

  // Makes a unary call, and waits for its status.
  grpc::StatusCode Call(RawService& service, Rpc rpc,
                        const google::protobuf::Message& request,
                        google::protobuf::Message* response) {
    DirectCall call(&wire_, {ToBytes(request)});
    call.Start(service.Start(rpc, call.context()));
    const grpc::StatusCode code = call.Wait().error_code();
    if (code == grpc::OK) Parse(call.received().at(0), response);
    return code;
  }

  static void Parse(grpc::ByteBuffer bytes,
                    google::protobuf::Message* message) {
    grpc::ProtoBufferReader reader(&bytes);
    EXPECT_TRUE(message->ParseFromZeroCopyStream(&reader));
  }

  void Create(const std::string& id) {
    v1::CreateAdapterRequest request;
    request.set_adapter_id(id);
    v1::CreateAdapterResponse response;
    EXPECT_EQ(Call(adapters(), Rpc::kCreateAdapter, request, &response),
              grpc::OK);
    EXPECT_EQ(response.adapter().adapter_id(), id);
  }

  static v1::ForwardBackwardRequest Step(const std::string& id, uint64_t step) {
    v1::ForwardBackwardRequest request;
    request.set_adapter_id(id);
    request.set_step(step);
    request.mutable_loss()->set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
    v1::Datum* const datum = request.add_data();
    datum->add_tokens(1);
    datum->add_targets(2);
    return request;
  }

  // Sends the step twice, like a client whose connection breaks.
  void Train(const std::string& id, uint64_t step, bool cancel) {
    DirectCall call(&wire_, {ToBytes(Step(id, step))});
    DirectCall again(&wire_, {ToBytes(Step(id, step))});
    call.Start(training().Start(Rpc::kForwardBackward, call.context()));
    again.Start(training().Start(Rpc::kForwardBackward, again.context()));
    if (cancel) again.Cancel();
    EXPECT_EQ(call.Wait().error_code(), grpc::OK);
    v1::ForwardBackwardResponse response;
    Parse(call.received().at(0), &response);
    EXPECT_EQ(response.step(), step);
    const grpc::StatusCode code = again.Wait().error_code();
    EXPECT_TRUE(code == grpc::OK || (cancel && code == grpc::CANCELLED));
  }

  void Optimize(const std::string& id, uint64_t step) {
    v1::OptimStepRequest request;
    request.set_adapter_id(id);
    request.set_step(step);
    v1::OptimStepResponse response;
    EXPECT_EQ(Call(training(), Rpc::kOptimStep, request, &response), grpc::OK);
    EXPECT_EQ(response.step(), step);
  }

  static v1::SampleRequest Prompt(const std::string& id) {
    v1::SampleRequest request;
    request.set_adapter_id(id);
    request.add_prompt(1);
    request.mutable_config()->set_max_tokens(8);
    return request;
  }

  grpc::StatusCode Sample(const std::string& id, bool cancel) {
    DirectCall call(&wire_, {ToBytes(Prompt(id))});
    call.Start(sampling().Start(Rpc::kSample, call.context()));
    if (cancel) call.Cancel();
    return call.Wait().error_code();
  }

  // Cancels from this thread while the other thread finds that writes fail.
  void Stream(const std::string& id, bool cancel) {
    v1::SampleStreamRequest request;
    *request.mutable_request() = Prompt(id);
    DirectCall call(&wire_, {ToBytes(request)});
    call.Start(sampling().Start(Rpc::kSampleStream, call.context()));
    if (cancel) call.Cancel();
    const grpc::StatusCode code = call.Wait().error_code();
    if (cancel && code == grpc::CANCELLED) return;
    int num_tokens = 0;
    for (const grpc::ByteBuffer& received : call.received()) {
      v1::SampleStreamResponse message;
      Parse(received, &message);
      num_tokens += message.tokens_size();
    }
    EXPECT_EQ(code, grpc::OK);
    EXPECT_TRUE(cancel || num_tokens == 8) << num_tokens;
  }

  // Exports an adapter and imports it under another name.
  void Copy(const std::string& id, const std::string& copy) {
    v1::ExportAdapterRequest request;
    request.set_adapter_id(id);
    DirectCall sent(&wire_, {ToBytes(request)});
    sent.Start(adapters().Start(Rpc::kExportAdapter, sent.context()));
    EXPECT_EQ(sent.Wait().error_code(), grpc::OK);
    v1::ImportAdapterRequest first;
    first.mutable_options()->set_adapter_id(copy);
    std::vector<grpc::ByteBuffer> parts = {ToBytes(first)};
    for (const grpc::ByteBuffer& received : sent.received()) {
      v1::ExportAdapterResponse part;
      Parse(received, &part);
      v1::ImportAdapterRequest next;
      *next.mutable_chunk() = part.chunk();
      parts.push_back(ToBytes(next));
    }
    DirectCall call(&wire_, parts);
    call.Start(adapters().Start(Rpc::kImportAdapter, call.context()));
    EXPECT_EQ(call.Wait().error_code(), grpc::OK);
    v1::ImportAdapterResponse response;
    Parse(call.received().at(0), &response);
    EXPECT_EQ(response.adapter().adapter_id(), copy);
  }

  void Delete(const std::string& id) {
    v1::DeleteAdapterRequest request;
    request.set_adapter_id(id);
    v1::DeleteAdapterResponse response;
    EXPECT_EQ(Call(adapters(), Rpc::kDeleteAdapter, request, &response),
              grpc::OK);
  }

  void SaveAndLoad(const std::string& id) {
    v1::SaveCheckpointRequest save;
    save.set_adapter_id(id);
    save.set_name("c");
    v1::SaveCheckpointResponse saved;
    EXPECT_EQ(Call(adapters(), Rpc::kSaveCheckpoint, save, &saved), grpc::OK);
    v1::LoadCheckpointRequest load;
    load.set_adapter_id(id);
    load.set_name("c");
    v1::LoadCheckpointResponse loaded;
    EXPECT_EQ(Call(adapters(), Rpc::kLoadCheckpoint, load, &loaded), grpc::OK);
    EXPECT_EQ(loaded.adapter().last_step(), saved.checkpoint().last_step());
  }

  // Makes the calls that operators use to inspect the server.
  void Look() {
    v1::ListAdaptersRequest list;
    list.set_page_size(2);
    v1::ListAdaptersResponse listed;
    EXPECT_EQ(Call(adapters(), Rpc::kListAdapters, list, &listed), grpc::OK);
    const v1::GetInfoRequest request;
    v1::GetInfoResponse response;
    EXPECT_EQ(Call(server(), Rpc::kGetInfo, request, &response), grpc::OK);
    EXPECT_GE(response.info().num_adapters(), 1U);
  }

  void Client(int number) {
    const std::string id = absl::StrCat("a", number);
    const std::string copy = absl::StrCat("copy", number);
    Create(id);
    for (int round = 0; round < kRounds; ++round) {
      Train(id, 2 * round + 1, /*cancel=*/round % 3 == 0);
      Optimize(id, 2 * round + 2);
      const grpc::StatusCode code = Sample(id, /*cancel=*/round % 4 == 0);
      EXPECT_TRUE(code == grpc::OK ||
                  (round % 4 == 0 && code == grpc::CANCELLED));
      Stream(id, /*cancel=*/round % 2 == 0);
      Look();
      if (round % 4 == 3) {
        Copy(id, copy);
        Delete(copy);
      }
    }
    SaveAndLoad(id);
  }

  // Starts a step that never runs, because it waits for an earlier step that
  // never arrives.
  std::unique_ptr<DirectCall> StartStuck(const std::string& id) {
    auto call = std::make_unique<DirectCall>(
        &wire_, std::vector<grpc::ByteBuffer>{ToBytes(Step(id, 2))});
    call->Start(training().Start(Rpc::kForwardBackward, call->context()));
    WaitForWire();  // The engine has the step.
    return call;
  }

  // Waits until the wire has done what calls have asked of it so far.
  void WaitForWire() {
    std::promise<void> done;
    wire_.Post([&done] { done.set_value(); });
    done.get_future().wait();
  }

  static void RunClients(const std::function<void(int)>& client) {
    std::vector<std::thread> clients;
    for (int c = 0; c < kClients; ++c) {
      clients.emplace_back([&client, c] { client(c); });
    }
    for (std::thread& thread : clients) thread.join();
  }

  // Outlives the engine. The engine's reply thread may still post to this
  // worker after a call has ended.
  Worker wire_;
  prometheus::Registry registry_;
  std::unique_ptr<CannedEngine> engine_ =
      std::make_unique<CannedEngine>(InfoWithRoom());
  ServiceCore core_;
  const std::unique_ptr<RawService> services_[4];
};

TEST_F(ServerCallsTest, AllCallsOfAllThreadsAreAnswered) {
  RunClients([this](int c) { Client(c); });
}

TEST_F(ServerCallsTest, AReplyWithoutRoomIsRefusedAndComesAgain) {
  Create("a");
  engine_->Hold();
  // The reply has more bytes than the request, which ends before.
  v1::ForwardBackwardRequest step = Step("a", 1);
  v1::Datum& datum = *step.mutable_data(0);
  datum.set_targets_per_token(2);
  for (int i = 1; i < 4000; ++i) datum.add_tokens(1);
  while (datum.targets_size() < 8000) datum.add_targets(2);
  DirectCall call(&wire_, {ToBytes(step)});
  call.Start(training().Start(Rpc::kForwardBackward, call.context()));
  WaitForWire();
  // The call and its request have room, and the reply has none.
  int64_t room = core_.memory->most() / 2 - (96 << 10);
  auto unread = core_.memory->Reserve("", room);
  while (!unread.ok()) unread = core_.memory->Reserve("", room -= 64);
  engine_->Release();
  EXPECT_EQ(call.Wait().error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(call.received().empty());
  // An export is refused before the engine makes it: there is room for a call
  // alone.
  auto rest =
      core_.memory->Reserve("", core_.memory->most() / 2 - room - (96 << 10));
  ASSERT_TRUE(rest.ok()) << rest.status();
  v1::ExportAdapterRequest wish;
  wish.set_adapter_id("a");
  DirectCall sent(&wire_, {ToBytes(wish)});
  sent.Start(adapters().Start(Rpc::kExportAdapter, sent.context()));
  EXPECT_EQ(sent.Wait().error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(std::ranges::count(engine_->seen().arrived,
                               CannedEngine::Call("ExportAdapter", 0)),
            0);
  *unread = nullptr;
  v1::ForwardBackwardResponse response;
  EXPECT_EQ(Call(training(), Rpc::kForwardBackward, step, &response), grpc::OK);
  EXPECT_EQ(response.step(), 1);
  EXPECT_EQ(engine_->seen().applied.size(), 1) << "the step ran twice";
}

TEST_F(ServerCallsTest, ADrainEndsCallsThatWaitForMissingSteps) {
  DirectCall drain(&wire_, {ToBytes(v1::DrainRequest())});
  std::atomic<int> sampled = 0;
  RunClients([&](int c) {
    const std::string id = absl::StrCat("a", c);
    Create(id);
    const auto stuck = StartStuck(id);
    EXPECT_EQ(Sample(id, /*cancel=*/false), grpc::OK);
    // The last client drains while the others sample.
    if (++sampled == kClients) {
      drain.Start(server().Start(Rpc::kDrain, drain.context()));
    }
    grpc::StatusCode code = grpc::OK;
    while (code == grpc::OK) code = Sample(id, /*cancel=*/false);
    EXPECT_EQ(code, grpc::UNAVAILABLE);
    EXPECT_EQ(stuck->Wait().error_code(), grpc::UNAVAILABLE);
  });
  EXPECT_EQ(drain.Wait().error_code(), grpc::OK);
}

TEST_F(ServerCallsTest, CallsThatTheEngineEndsWithAreUnavailable) {
  std::atomic<int> started = 0;
  std::thread shutdown([&] {
    while (started < kClients) std::this_thread::yield();
    engine_.reset();
  });
  RunClients([&](int c) {
    const std::string id = absl::StrCat("a", c);
    Create(id);
    const auto stuck = StartStuck(id);
    ++started;
    EXPECT_EQ(stuck->Wait().error_code(), grpc::UNAVAILABLE);
  });
  shutdown.join();
}

// A client may send many requests and never end them. gRPC keeps only the first
// few of them.
TEST_F(ServerCallsTest, AClientSendsOnlyAFewRequestsAtATime) {
  Create("a");
  std::vector<std::unique_ptr<DirectCall>> silent;
  std::vector<CallReactor*> reactors;
  for (int i = 0; i < ReadTurns::kAtOnce; ++i) {
    silent.push_back(
        std::make_unique<DirectCall>(&wire_, std::vector<grpc::ByteBuffer>()));
    reactors.push_back(
        training().Start(Rpc::kForwardBackward, silent[i]->context()));
  }
  DirectCall next(&wire_, {ToBytes(Step("a", 1))});
  next.Start(training().Start(Rpc::kForwardBackward, next.context()));
  DirectCall leaves(&wire_, {ToBytes(Step("a", 2))});
  leaves.Start(training().Start(Rpc::kForwardBackward, leaves.context()));
  WaitForWire();
  EXPECT_TRUE(engine_->seen().applied.empty());
  leaves.Cancel();
  EXPECT_EQ(leaves.Wait().error_code(), grpc::CANCELLED);
  // Small requests do not wait.
  v1::GetInfoResponse info;
  EXPECT_EQ(Call(server(), Rpc::kGetInfo, v1::GetInfoRequest(), &info),
            grpc::OK);
  // When a client has gone, its place is free.
  silent[0]->Start(reactors[0]);
  EXPECT_EQ(next.Wait().error_code(), grpc::OK);
  EXPECT_EQ(engine_->seen().applied.size(), 1);
  for (size_t i = 0; i < silent.size(); ++i) {
    if (i > 0) silent[i]->Start(reactors[i]);
    EXPECT_EQ(silent[i]->Wait().error_code(), grpc::CANCELLED);
  }
}

TEST_F(ServerCallsTest, AHealthWatchShowsChangesAndEndsWithTheServer) {
  const auto service = MakeHealthService(&core_);
  core_.health.Set("s", Health::kNotServing);
  google::protobuf::StringValue request;
  request.set_value("s");
  DirectCall watch(&wire_, {ToBytes(request)});
  watch.Start(service->Start(Rpc::kHealthWatch, watch.context()));
  DirectCall leaves(&wire_, {ToBytes(request)});
  leaves.Start(service->Start(Rpc::kHealthWatch, leaves.context()));
  WaitForWire();
  leaves.Cancel();
  EXPECT_EQ(leaves.Wait().error_code(), grpc::CANCELLED);
  core_.health.Set("s", Health::kServing);
  WaitForWire();
  core_.health.End();
  EXPECT_EQ(watch.Wait().error_code(), grpc::UNAVAILABLE);
  std::vector<int> shown;
  for (const grpc::ByteBuffer& message : watch.received()) {
    google::protobuf::Int32Value status;
    Parse(message, &status);
    shown.push_back(status.value());
  }
  EXPECT_EQ(shown, std::vector<int>({2, 1}));
}

TEST_F(ServerCallsTest, ASampleIsChargedForItsResultBeforeItRuns) {
  Create("a");
  v1::SampleStreamRequest request;
  *request.mutable_request() = Prompt("a");
  request.mutable_request()->mutable_config()->set_max_tokens(20000);
  const auto run = [&](Rpc rpc, const google::protobuf::Message& message) {
    DirectCall call(&wire_, {ToBytes(message)});
    call.Start(sampling().Start(rpc, call.context()));
    return call.Wait().error_code();
  };
  auto others =
      core_.memory->Reserve("", core_.memory->most() / 2 - (256 << 10)).value();
  EXPECT_EQ(run(Rpc::kSample, request.request()), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(run(Rpc::kSampleStream, request), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(std::ranges::count(engine_->seen().arrived,
                               CannedEngine::Call("Sample", 0)),
            0);
  others = nullptr;
  EXPECT_EQ(run(Rpc::kSample, request.request()), grpc::OK);
  EXPECT_EQ(run(Rpc::kSampleStream, request), grpc::OK);
  // Nobody could ever have so many likely tokens.
  v1::SampleRequest& large = *request.mutable_request();
  large.set_top_logprobs(20);
  large.set_num_samples(256);
  large.mutable_config()->set_max_tokens(60000);
  EXPECT_EQ(run(Rpc::kSample, large), grpc::RESOURCE_EXHAUSTED);
}

TEST_F(ServerCallsTest, AStepIsChargedUntilItEnds) {
  Create("a");
  engine_->Hold();
  const auto is_held = [this](int64_t bytes) {
    const int64_t share = core_.memory->most() / 2;
    const int64_t rest = share - share / 8 - bytes + 1;
    return !core_.memory->Reserve("", rest, FairBudget::Term::kLong).ok();
  };
  v1::ForwardBackwardRequest step = Step("a", 1);
  v1::Datum& datum = *step.mutable_data(0);
  for (int i = 1; i < 30000; ++i) {
    datum.add_tokens(1);
    datum.add_targets(2);
  }
  constexpr int64_t kStepBytes = 30000 * 8;
  const auto leave = [&](uint64_t number) {
    step.set_step(number);
    DirectCall call(&wire_, {ToBytes(step)});
    call.Start(training().Start(Rpc::kForwardBackward, call.context()));
    WaitForWire();
    EXPECT_TRUE(is_held(kStepBytes));
    call.Cancel();
    EXPECT_EQ(call.Wait().error_code(), grpc::CANCELLED);
  };
  leave(2);
  // Threads of gRPC may hold a call's end a moment longer than its client.
  const auto is_free = [&] {
    const absl::Time limit = absl::Now() + absl::Seconds(30);
    while (is_held(1) && absl::Now() < limit) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    return !is_held(1);
  };
  EXPECT_TRUE(is_free()) << "a step that is not accepted ends with its call";
  leave(1);
  EXPECT_TRUE(is_held(kStepBytes)) << "an accepted step runs without its call";
  engine_->Release();
  v1::ForwardBackwardResponse response;
  EXPECT_EQ(Call(training(), Rpc::kForwardBackward, Step("a", 2), &response),
            grpc::OK);
  EXPECT_TRUE(is_free());
}

TEST_F(ServerCallsTest, CallsThatWaitLeaveCallsForWhatTheyWaitFor) {
  Create("a");
  v1::ForwardBackwardResponse response;
  EXPECT_EQ(Call(training(), Rpc::kForwardBackward,
                 Step("a", 1 + kMaxCallsPerConnection / 2), &response),
            grpc::RESOURCE_EXHAUSTED);
  DirectCall waits(&wire_, {ToBytes(Step("a", kMaxCallsPerConnection / 2))});
  waits.Start(training().Start(Rpc::kForwardBackward, waits.context()));
  WaitForWire();
  EXPECT_EQ(engine_->seen().num_waiting, 1);
  waits.Cancel();
  EXPECT_EQ(waits.Wait().error_code(), grpc::CANCELLED);
}

TEST_F(ServerCallsTest, ACallWithoutItsRequestIsChargedAndEnds) {
  const auto others =
      core_.memory->Reserve("", core_.memory->most() / 2 - (128 << 10));
  const auto has_room = [&] {
    return core_.memory->Reserve("", 100 << 10).ok();
  };
  EXPECT_TRUE(has_room());
  DirectCall silent(&wire_, {});
  // The client sends nothing until the call is cancelled.
  auto* const reactor = server().Start(Rpc::kGetInfo, silent.context());
  EXPECT_FALSE(has_room());
  const absl::Time now = SteadyNow();
  core_.stalled.Cancel(now + StalledCalls::kPatience / 2);
  EXPECT_FALSE(silent.context()->IsCancelled());
  core_.stalled.Cancel(now + 2 * StalledCalls::kPatience);
  EXPECT_TRUE(silent.context()->IsCancelled());
  silent.Start(reactor);
  EXPECT_EQ(silent.Wait().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(has_room());
}

TEST_F(ServerCallsTest, ATokenizerIsChargedWhileItIsSent) {
  core_.tokenizer.files.emplace_back("tokenizer.json", "{}");
  const auto get = [this] {
    DirectCall call(&wire_, {ToBytes(v1::GetTokenizerRequest())});
    call.Start(server().Start(Rpc::kGetTokenizer, call.context()));
    return call.Wait().error_code();
  };
  auto held =
      core_.memory->Reserve("", core_.memory->most() - (1 << 20)).value();
  EXPECT_EQ(get(), grpc::RESOURCE_EXHAUSTED);
  held.reset();
  EXPECT_EQ(get(), grpc::OK);
  EXPECT_TRUE(core_.memory->Reserve("", core_.memory->most()).ok());
}

TEST_F(ServerCallsTest, ARequestIsChargedBeforeItIsParsed) {
  auto held = core_.memory->Reserve("", core_.memory->most()).value();
  v1::GetInfoResponse response;
  EXPECT_EQ(Call(server(), Rpc::kGetInfo, v1::GetInfoRequest(), &response),
            grpc::RESOURCE_EXHAUSTED);
  held.reset();
  EXPECT_EQ(Call(server(), Rpc::kGetInfo, v1::GetInfoRequest(), &response),
            grpc::OK);
  // The charge ends with the call's request.
  EXPECT_TRUE(core_.memory->Reserve("", core_.memory->most()).ok());
}

TEST_F(ServerCallsTest, ARefusedCallHasBegunNoLonger) {
  const absl::Time now = SteadyNow();
  for (int i = 0; i < TenantQuota::kMaxBegun; ++i) {
    ASSERT_TRUE(core_.quota.Begin("", now).ok());
  }
  EXPECT_FALSE(core_.quota.Begin("", now).ok());
  const auto held = core_.memory->Reserve("", core_.memory->most());
  ASSERT_TRUE(held.ok()) << held.status();
  v1::GetInfoResponse response;
  EXPECT_EQ(Call(server(), Rpc::kGetInfo, v1::GetInfoRequest(), &response),
            grpc::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(core_.quota.Begin("", now).ok());
}

TEST(ReadTurnsTest, OnlySoManyCallsOfAClientWait) {
  ReadTurns turns;
  size_t num_reading = 0;
  const auto begin = [&](const std::string& client) {
    return turns.Begin(client, &turns, [&] { ++num_reading; });
  };
  for (size_t i = 0; i < ReadTurns::kAtOnce + ReadTurns::kMostWaiting; ++i) {
    EXPECT_TRUE(begin("a"));
  }
  EXPECT_FALSE(begin("a"));
  EXPECT_TRUE(begin("b"));
  EXPECT_EQ(num_reading, ReadTurns::kAtOnce + 1);
  turns.End("a");
  EXPECT_EQ(num_reading, ReadTurns::kAtOnce + 2);
  EXPECT_TRUE(begin("a"));
}

TEST(CancelSlotTest, HandleAndCancellationMeetFromAnyThreads) {
  for (int round = 0; round < 200; ++round) {
    CancelSlot slot;
    std::atomic<int> num_cancelled = 0;
    std::thread setter(
        [&] { slot.Set(CancelHandle([&num_cancelled] { ++num_cancelled; })); });
    std::thread canceller([&] { slot.Cancel(); });
    std::thread other([&] { slot.Cancel(); });
    setter.join();
    canceller.join();
    other.join();
    EXPECT_EQ(num_cancelled, 1);
  }
}

}  // namespace
}  // namespace weft::server
