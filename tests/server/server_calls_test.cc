// Calls the services' handlers from several threads, without a connection, for
// ThreadSanitizer.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "server/call.h"
#include "server/cancel_slot.h"
#include "server/raw_services.h"
#include "server/services.h"
#include "src/base/log.h"
#include "tests/support/canned_engine.h"
#include "tests/support/direct_call.h"

namespace weft {
namespace {

constexpr int kClients = 4;
constexpr int kRounds = 12;

EngineInfo InfoWithRoom() {
  EngineInfo info = CannedInfo();
  info.max_adapters = 2 * kClients;
  return info;
}

// Returns the service as the generated class that has the handlers.
template <typename Service>
Service& As(const std::unique_ptr<grpc::Service>& service) {
  return static_cast<Service&>(*service);
}

class ServerCallsTest : public ::testing::Test {
 protected:
  ServerCallsTest()
      : core_(ServerOptions(), &registry_),
        services_{MakeTrainingService(&core_), MakeSamplingService(&core_),
                  MakeAdapterService(&core_), MakeServerService(&core_)} {
    SetLogLevel(LogLevel::kError);
    core_.engine.Set(engine_.get());
    core_.begin_drain = [this] { core_.engine.StartDraining(); };
  }
  ~ServerCallsTest() override {
    engine_.reset();  // The engine's reply thread may still hold a call that
                      // has ended.
    EXPECT_EQ(core_.open_calls, 0);
    // No call holds anything any more.
    EXPECT_TRUE(core_.imports->Reserve("", core_.imports->most()).ok());
    EXPECT_TRUE(core_.memory->Reserve("", core_.memory->most()).ok());
  }

  auto& training() { return As<RawTrainingService>(services_[0]); }
  auto& sampling() { return As<RawSamplingService>(services_[1]); }
  auto& adapters() { return As<RawAdapterService>(services_[2]); }
  auto& server() { return As<RawServerService>(services_[3]); }

  // Runs a unary handler, `handle(context, request, response)`, and waits for
  // its status.
  template <typename Handle>
  grpc::StatusCode Call(const google::protobuf::Message& request,
                        google::protobuf::Message* response,
                        const Handle& handle) {
    grpc::ByteBuffer bytes = ToBytes(request);
    grpc::ByteBuffer reply;
    DirectUnary call(&wire_);
    call.Start(handle(call.context(), &bytes, &reply));
    const grpc::StatusCode code = call.Wait().error_code();
    if (code == grpc::OK) Parse(reply, response);
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
    EXPECT_EQ(
        Call(request, &response,
             [&](auto*... args) { return adapters().CreateAdapter(args...); }),
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
    grpc::ByteBuffer request = ToBytes(Step(id, step));
    grpc::ByteBuffer repeated = ToBytes(Step(id, step));
    grpc::ByteBuffer reply;
    grpc::ByteBuffer ignored;
    DirectUnary call(&wire_);
    DirectUnary again(&wire_);
    call.Start(training().ForwardBackward(call.context(), &request, &reply));
    again.Start(
        training().ForwardBackward(again.context(), &repeated, &ignored));
    if (cancel) again.Cancel();
    EXPECT_EQ(call.Wait().error_code(), grpc::OK);
    v1::ForwardBackwardResponse response;
    Parse(reply, &response);
    EXPECT_EQ(response.step(), step);
    const grpc::StatusCode code = again.Wait().error_code();
    EXPECT_TRUE(code == grpc::OK || (cancel && code == grpc::CANCELLED));
  }

  void Optimize(const std::string& id, uint64_t step) {
    v1::OptimStepRequest request;
    request.set_adapter_id(id);
    request.set_step(step);
    v1::OptimStepResponse response;
    EXPECT_EQ(
        Call(request, &response,
             [&](auto*... args) { return training().OptimStep(args...); }),
        grpc::OK);
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
    grpc::ByteBuffer request = ToBytes(Prompt(id));
    grpc::ByteBuffer reply;
    DirectUnary call(&wire_);
    call.Start(sampling().Sample(call.context(), &request, &reply));
    if (cancel) call.Cancel();
    return call.Wait().error_code();
  }

  // Cancels from this thread while the other thread finds that writes fail.
  void Stream(const std::string& id, bool cancel) {
    v1::SampleStreamRequest request;
    *request.mutable_request() = Prompt(id);
    grpc::ByteBuffer bytes = ToBytes(request);
    DirectWriter<grpc::ByteBuffer> call(&wire_);
    call.Start(sampling().SampleStream(call.context(), &bytes));
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
    grpc::ByteBuffer bytes = ToBytes(request);
    DirectWriter<grpc::ByteBuffer> sent(&wire_);
    sent.Start(adapters().ExportAdapter(sent.context(), &bytes));
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
    grpc::ByteBuffer reply;
    DirectReader<grpc::ByteBuffer> call(&wire_, parts);
    call.Start(adapters().ImportAdapter(call.context(), &reply));
    EXPECT_EQ(call.Wait().error_code(), grpc::OK);
    v1::ImportAdapterResponse response;
    Parse(reply, &response);
    EXPECT_EQ(response.adapter().adapter_id(), copy);
  }

  void Delete(const std::string& id) {
    v1::DeleteAdapterRequest request;
    request.set_adapter_id(id);
    v1::DeleteAdapterResponse response;
    EXPECT_EQ(
        Call(request, &response,
             [&](auto*... args) { return adapters().DeleteAdapter(args...); }),
        grpc::OK);
  }

  void SaveAndLoad(const std::string& id) {
    v1::SaveCheckpointRequest save;
    save.set_adapter_id(id);
    save.set_name("c");
    v1::SaveCheckpointResponse saved;
    EXPECT_EQ(
        Call(save, &saved,
             [&](auto*... args) { return adapters().SaveCheckpoint(args...); }),
        grpc::OK);
    v1::LoadCheckpointRequest load;
    load.set_adapter_id(id);
    load.set_name("c");
    v1::LoadCheckpointResponse loaded;
    EXPECT_EQ(
        Call(load, &loaded,
             [&](auto*... args) { return adapters().LoadCheckpoint(args...); }),
        grpc::OK);
    EXPECT_EQ(loaded.adapter().last_step(), saved.checkpoint().last_step());
  }

  // Makes the calls that operators use to inspect the server.
  void Look() {
    v1::ListAdaptersRequest list;
    list.set_page_size(2);
    v1::ListAdaptersResponse listed;
    EXPECT_EQ(
        Call(list, &listed,
             [&](auto*... args) { return adapters().ListAdapters(args...); }),
        grpc::OK);
    const v1::GetInfoRequest request;
    v1::GetInfoResponse response;
    EXPECT_EQ(Call(request, &response,
                   [&](auto*... args) { return server().GetInfo(args...); }),
              grpc::OK);
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
  void StartStuck(const std::string& id, DirectUnary* call,
                  grpc::ByteBuffer* response) {
    grpc::ByteBuffer request = ToBytes(Step(id, 2));
    call->Start(
        training().ForwardBackward(call->context(), &request, response));
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
  const std::unique_ptr<grpc::Service> services_[4];
};

TEST_F(ServerCallsTest, AllCallsOfAllThreadsAreAnswered) {
  RunClients([this](int c) { Client(c); });
}

TEST_F(ServerCallsTest, AReplyWithoutRoomIsRefusedAndComesAgain) {
  Create("a");
  engine_->Hold();
  grpc::ByteBuffer request = ToBytes(Step("a", 1));
  grpc::ByteBuffer reply;
  DirectUnary call(&wire_);
  call.Start(training().ForwardBackward(call.context(), &request, &reply));
  // The call has room, and its reply has none.
  auto unread =
      core_.memory->Reserve("", core_.memory->most() / 2 - (32 << 10));
  ASSERT_TRUE(unread.ok());
  engine_->Release();
  EXPECT_EQ(call.Wait().error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(reply.Length(), 0);
  // An export is refused before the engine makes it.
  v1::ExportAdapterRequest wish;
  wish.set_adapter_id("a");
  grpc::ByteBuffer wished = ToBytes(wish);
  DirectWriter<grpc::ByteBuffer> sent(&wire_);
  sent.Start(adapters().ExportAdapter(sent.context(), &wished));
  EXPECT_EQ(sent.Wait().error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(std::ranges::count(engine_->arrived(),
                               CannedEngine::Call("ExportAdapter", 0)),
            0);
  *unread = nullptr;
  v1::ForwardBackwardResponse response;
  EXPECT_EQ(
      Call(Step("a", 1), &response,
           [&](auto*... args) { return training().ForwardBackward(args...); }),
      grpc::OK);
  EXPECT_EQ(response.step(), 1);
  EXPECT_EQ(engine_->applied().size(), 1) << "the step ran twice";
}

TEST_F(ServerCallsTest, LikelyTokensAreChargedBeforeTheyAreDrawn) {
  Create("a");
  const auto unread =
      core_.memory->Reserve("", core_.memory->most() / 2 - (64 << 10));
  ASSERT_TRUE(unread.ok());
  // A call takes 32 KiB, so 32 KiB are left for what it asks.
  v1::SampleRequest request = Prompt("a");
  request.set_num_samples(8);
  v1::SampleResponse response;
  const auto sample = [this](auto*... args) {
    return sampling().Sample(args...);
  };
  EXPECT_EQ(Call(request, &response, sample), grpc::OK);
  request.set_top_logprobs(20);  // Of 64 tokens: 51,200 bytes.
  EXPECT_EQ(Call(request, &response, sample), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(engine_->last_sample().top_logprobs, 0) << "it has run";
}

TEST_F(ServerCallsTest, ADrainIsAnsweredWhenOpenCallsAreCancelled) {
  grpc::ByteBuffer request = ToBytes(v1::DrainRequest());
  grpc::ByteBuffer response;
  DirectUnary drain(&wire_);
  std::atomic<int> sampled = 0;
  RunClients([&](int c) {
    const std::string id = absl::StrCat("a", c);
    Create(id);
    grpc::ByteBuffer never;
    DirectUnary stuck(&wire_);
    StartStuck(id, &stuck, &never);
    EXPECT_EQ(Sample(id, /*cancel=*/false), grpc::OK);
    // The last client drains while the others sample.
    if (++sampled == kClients) {
      drain.Start(server().Drain(drain.context(), &request, &response));
    }
    grpc::StatusCode code = grpc::OK;
    while (code == grpc::OK) code = Sample(id, /*cancel=*/false);
    EXPECT_EQ(code, grpc::UNAVAILABLE);
    stuck.Cancel();
    EXPECT_EQ(stuck.Wait().error_code(), grpc::CANCELLED);
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
    grpc::ByteBuffer never;
    DirectUnary stuck(&wire_);
    StartStuck(id, &stuck, &never);
    ++started;
    EXPECT_EQ(stuck.Wait().error_code(), grpc::UNAVAILABLE);
  });
  shutdown.join();
}

TEST_F(ServerCallsTest, ARequestIsChargedBeforeItIsParsed) {
  auto held = core_.memory->Reserve("", core_.memory->most());
  ASSERT_TRUE(held.ok()) << held.status();
  v1::GetInfoResponse response;
  const auto get = [this](auto*... args) { return server().GetInfo(args...); };
  EXPECT_EQ(Call(v1::GetInfoRequest(), &response, get),
            grpc::RESOURCE_EXHAUSTED);
  held->reset();
  EXPECT_EQ(Call(v1::GetInfoRequest(), &response, get), grpc::OK);
  // The charge ends with the call's request.
  EXPECT_TRUE(core_.memory->Reserve("", core_.memory->most()).ok());
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
}  // namespace weft
