#include "server/daemon/listeners.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/generic_stub.h"
#include "src/base/sha256.h"
#include "tests/sampling/tokenizer_folder.h"
#include "tests/server/server_fixture.h"
#include "tests/support/temp_folder.h"

namespace weft::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class ListenersTest : public ServerTest {
 protected:
  int Health(const std::string& service) { return HealthOf(channel_, service); }

  // Returns the undecoded answer of server reflection to "list services".
  std::string ListServices() {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareCall(
        &context,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        &queue);
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(this);
    queue.Next(&tag, &ok);
    // The bytes encode field 7, list_services = "*".
    const grpc::Slice request("\x3a\x01*", 3);
    call->Write(grpc::ByteBuffer(&request, 1), this);
    queue.Next(&tag, &ok);
    grpc::ByteBuffer reply;
    call->Read(&reply, this);
    queue.Next(&tag, &ok);
    context.TryCancel();
    std::vector<grpc::Slice> slices;
    reply.Dump(&slices);
    std::string bytes;
    for (const grpc::Slice& slice : slices) {
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    return bytes;
  }

  grpc::Status Get(grpc::ClientContext* context) {
    const auto request = Make<v1::GetAdapterRequest>("adapter_id = 'a'");
    v1::GetAdapterResponse response;
    return adapters_->GetAdapter(context, request, &response);
  }

  v1::ServerInfo Info() {
    const auto response = Answer<v1::GetInfoResponse>(v1::GetInfoRequest());
    return response.info();
  }

  // Gets the tokenizer. `sent` becomes "NAME:BYTES " of each piece.
  grpc::Status Tokenizer(std::string* sent) {
    grpc::ClientContext context;
    const auto reader =
        server_->GetTokenizer(&context, v1::GetTokenizerRequest());
    v1::GetTokenizerResponse piece;
    while (reader->Read(&piece)) {
      absl::StrAppend(sent, piece.chunk().name(), ":",
                      piece.chunk().data().size(), " ");
    }
    return reader->Finish();
  }
};

// Abseil would end the process, in case another thread takes the locks in the
// other order some day.
TEST_F(ListenersTest, NoOrderOfALibrarysLocksEndsTheProcess) {
  StartServer();
  absl::Mutex a;
  absl::Mutex b;
  {
    const absl::MutexLock first(&a);
    const absl::MutexLock second(&b);
  }
  const absl::MutexLock first(&b);
  const absl::MutexLock second(&a);
}

TEST_F(ListenersTest, HealthFollowsTheEngine) {
  StartServer();
  EXPECT_EQ(Health(""), kNotServing);
  EXPECT_EQ(Health("weft.v1.TrainingService"), kNotServing);
  EXPECT_EQ(Health("liveness"), kServing);
  AttachEngine();
  EXPECT_EQ(Health(""), kServing);
  EXPECT_EQ(Health("weft.v1.TrainingService"), kServing);
  listeners_->StartDraining();
  EXPECT_EQ(Health(""), kNotServing);
  EXPECT_EQ(Health("weft.v1.TrainingService"), kNotServing);
  EXPECT_EQ(Health("liveness"), kServing);
  EXPECT_EQ(Health("unknown"), -static_cast<int>(grpc::StatusCode::NOT_FOUND));
}

TEST_F(ListenersTest, LivenessFollowsTheHeartbeat) {
  StartServer();
  const absl::Time now = absl::Now();
  // Loading does not count as a hang, however long it takes.
  listeners_->UpdateLiveness(now + absl::Hours(24));
  EXPECT_EQ(Health("liveness"), kServing);
  AttachEngine();
  engine_.HangSince(now);
  listeners_->UpdateLiveness(now + kHeartbeatLimit);
  EXPECT_EQ(Health("liveness"), kServing);
  EXPECT_EQ(MetricValue("weft_watchdog_trips_total"), 0);
  listeners_->UpdateLiveness(now + kHeartbeatLimit + absl::Seconds(1));
  EXPECT_EQ(Health("liveness"), kNotServing);
  EXPECT_EQ(Health("weft.v1.TrainingService"), kServing);
  listeners_->StartDraining();
  listeners_->UpdateLiveness(now + kHeartbeatLimit + absl::Seconds(2));
  EXPECT_EQ(Health("liveness"), kNotServing);
  // One hang counts once.
  EXPECT_EQ(MetricValue("weft_watchdog_trips_total"), 1);
  // The engine continues, because it only ran a long step.
  engine_.HangSince(std::nullopt);
  listeners_->UpdateLiveness(absl::Now());
  EXPECT_EQ(Health("liveness"), kServing);
  EXPECT_EQ(MetricValue("weft_watchdog_trips_total"), 1);
}

TEST_F(ListenersTest, WhileStartingOnlyGetInfoAnswers) {
  StartServer();
  grpc::ClientContext context;
  const grpc::Status status = Get(&context);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("starting"));
  EXPECT_EQ(Trailer(context, "grpc-retry-pushback-ms"), "1000");
  const v1::ServerInfo info = Info();
  EXPECT_EQ(info.model().name(), "toy");
  EXPECT_EQ(info.model().vocab_size(), 0u);
  EXPECT_EQ(info.max_message_bytes(), 4u << 20);
  EXPECT_EQ(Send(v1::DrainRequest()).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(MetricValue("weft_requests_rejected_total{reason=\"starting\"}"),
            2);
}

TEST_F(ListenersTest, SendsTheTokenizerWhileItStarts) {
  const sampling::TokenizerFolder folder;
  const std::string large((1 << 20) + 7, 'x');
  folder.Write(large);
  std::ofstream(folder.path() + "/tokenizer_config.json") << "{}";
  // A cache of Hugging Face has links. An empty file is sent, too.
  std::ofstream(folder.path() + "/blob").close();
  std::filesystem::create_symlink("blob", folder.path() + "/added_tokens.json");
  StartServer(TestOptions(), TokenizerFiles::Load(folder.path()));
  std::string sent;
  ASSERT_TRUE(Tokenizer(&sent).ok());
  EXPECT_EQ(sent, absl::StrCat("added_tokens.json:0 tokenizer.json:", 1 << 20,
                               " tokenizer.json:7 tokenizer_config.json:2 "));
  const std::string bytes =
      absl::StrCat(absl::string_view("added_tokens.json\0000\0", 20),
                   absl::string_view("tokenizer.json\0", 15), large.size(),
                   absl::string_view("\0", 1), large,
                   absl::string_view("tokenizer_config.json\0002\0{}", 26));
  EXPECT_EQ(Info().model().tokenizer_fingerprint(),
            absl::BytesToHexString(Sha256(bytes)));
}

TEST_F(ListenersTest, AFolderWithoutATokenizerSendsNone) {
  const sampling::TokenizerFolder folder;
  const std::string path = folder.path() + "/tokenizer.json";
  for (const absl::string_view what : {"none", "a folder", "too large"}) {
    if (what == "a folder") std::filesystem::create_directory(path);
    if (what == "too large") {
      std::filesystem::remove(path);
      std::ofstream(path) << "{}";
      std::filesystem::resize_file(path, (256 << 20) + 1);
    }
    std::ofstream(folder.path() + "/generation_config.json") << "{}";
    StartServer(TestOptions(), TokenizerFiles::Load(folder.path()));
    EXPECT_EQ(Info().model().tokenizer_fingerprint(), "");
    std::string sent;
    const grpc::Status status = Tokenizer(&sent);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_THAT(status.error_message(),
                HasSubstr("no tokenizer.json: use that"));
  }
}

TEST_F(ListenersTest, GetInfoTellsModelAndLimits) {
  StartReadyServer();
  const v1::ServerInfo info = Info();
  EXPECT_EQ(info.version(), "0.1.0");
  EXPECT_EQ(info.device(), "cpu");
  EXPECT_EQ(info.model().architecture(), "canned");
  EXPECT_EQ(info.model().vocab_size(), 100u);
  EXPECT_EQ(info.model().context_length(), 32u);
  EXPECT_THAT(info.model().eos_token_ids(), ::testing::ElementsAre(2));
  EXPECT_EQ(info.model().dtype(), "f32");
  EXPECT_EQ(info.max_adapters(), 4u);
  EXPECT_EQ(info.num_adapters(), 1u);
  EXPECT_EQ(info.max_rank(), 64u);
  EXPECT_EQ(info.max_data_per_request(), 3u);
  EXPECT_EQ(info.max_tokens_per_request(), 40u);
  EXPECT_EQ(info.max_samples(), 8u);
  EXPECT_THAT(info.losses(), ::testing::ElementsAre(
                                 "cross_entropy", "importance_sampling", "ppo",
                                 "cispo", "dro", "gspo", "stable_reinforce",
                                 "custom", "forward_kl", "reverse_kl", "js"));
  EXPECT_FALSE(info.string_stops());
  EXPECT_EQ(info.max_adapters_per_tenant(), 3u);
  EXPECT_EQ(info.max_adapter_bytes_per_tenant(), 1u << 30);
  EXPECT_GE(info.request_memory_bytes(), 26 * info.max_message_bytes());
  EXPECT_EQ(info.replay_window(), 64u);
  EXPECT_EQ(info.max_targets_per_token(), 1024u);
  EXPECT_EQ(info.max_stop_entries(), 64u);
  EXPECT_EQ(info.max_top_logprobs(), 1024u);
  EXPECT_FALSE(info.draining());
}

TEST_F(ListenersTest, DrainFinishesWhatWasAcceptedAndRefusesTheRest) {
  StartReadyServer();
  engine_.Hold();
  grpc::Status accepted;
  std::thread worker([&] { accepted = Send(GoodStep()); });
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_waiting == 1; }));
  grpc::Status drained;
  std::thread drainer([&] { drained = Send(v1::DrainRequest()); });
  EXPECT_TRUE(Eventually([&] { return listeners_->draining(); }));
  const grpc::Status refused = Send(GoodStep());
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.error_message(), HasSubstr("draining"));
  grpc::ClientContext reading;
  EXPECT_TRUE(Get(&reading).ok());
  EXPECT_TRUE(Info().draining());
  EXPECT_EQ(Health(""), kNotServing);
  engine_.Release();
  worker.join();
  drainer.join();
  EXPECT_TRUE(accepted.ok()) << accepted.error_message();
  EXPECT_TRUE(drained.ok()) << drained.error_message();
  EXPECT_EQ(MetricValue("weft_startup_phase{phase=\"draining\"}"), 1);
}

TEST_F(ListenersTest, ADrainedServerSavesAndCanTakeWorkAgain) {
  StartReadyServer();
  const auto call = [this](auto method, const auto& request, auto response) {
    grpc::ClientContext context;
    return (server_.get()->*method)(&context, request, &response).error_code();
  };
  const auto undrain = [&] {
    return call(&v1::ServerService::Stub::Undrain, v1::UndrainRequest(),
                v1::UndrainResponse());
  };
  EXPECT_EQ(call(&v1::ServerService::Stub::Drain, v1::DrainRequest(),
                 v1::DrainResponse()),
            grpc::OK);
  const auto save =
      Make<v1::SaveCheckpointRequest>("adapter_id = 'a'; name = 'last'");
  EXPECT_TRUE(Send(save).ok());
  const auto list = Make<v1::ListCheckpointsRequest>("adapter_id = 'a'");
  const auto listed = Answer<v1::ListCheckpointsResponse>(list);
  EXPECT_EQ(listed.checkpoints_size(), 1);

  EXPECT_EQ(undrain(), grpc::OK);
  EXPECT_FALSE(Info().draining());
  EXPECT_EQ(Health(""), kServing);
  EXPECT_TRUE(Send(GoodStep()).ok());
  EXPECT_EQ(MetricValue("weft_startup_phase{phase=\"serving\"}"), 1);

  // A process that has been told to end takes no work again.
  listeners_->StartDraining();
  EXPECT_EQ(undrain(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Health(""), kNotServing);
}

TEST_F(ListenersTest, ReflectionListsTheFourServices) {
  StartServer();
  EXPECT_THAT(ListServices(), AllOf(HasSubstr("weft.v1.TrainingService"),
                                    HasSubstr("weft.v1.SamplingService"),
                                    HasSubstr("weft.v1.AdapterService"),
                                    HasSubstr("weft.v1.ServerService")));
}

TEST_F(ListenersTest, CountsCallsByMethodAndCode) {
  StartReadyServer();
  grpc::ClientContext good;
  EXPECT_TRUE(Get(&good).ok());
  Send(v1::GetAdapterRequest());
  const std::string labels =
      "grpc_method=\"GetAdapter\",grpc_service=\"weft.v1.AdapterService\","
      "grpc_type=\"unary\"}";
  EXPECT_EQ(MetricValue("grpc_server_started_total{" + labels), 2);
  EXPECT_EQ(MetricValue("grpc_server_handled_total{grpc_code=\"OK\"," + labels),
            1);
  EXPECT_EQ(
      MetricValue("grpc_server_handled_total{grpc_code=\"InvalidArgument\"," +
                  labels),
      1);
  EXPECT_EQ(MetricValue("grpc_server_handling_seconds_count{" + labels), 2);
  EXPECT_EQ(MetricValue("weft_requests_rejected_total{reason=\"invalid\"}"), 1);
  EXPECT_EQ(MetricValue("weft_startup_phase{phase=\"serving\"}"), 1);
}

TEST_F(ListenersTest, MetricsPagePassesPromtool) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "promtool is not installed (Debian package prometheus)";
  }
  StartReadyServer(MetricsOptions());
  const std::string page = Scrape();
  EXPECT_THAT(page, HasSubstr("process_resident_memory_bytes"));
  EXPECT_THAT(page, HasSubstr("weft_build_info"));
  const TempFolder folder;
  const std::string command =
      "promtool check metrics < " + folder.Write("page.txt", page);
  EXPECT_EQ(std::system(command.c_str()), 0);
}

TEST_F(ListenersTest, SecondServerOnThePortIsRefused) {
  StartServer();
  ServerOptions options = TestOptions();
  options.listen = listeners_->address();
  const auto second =
      Listeners::Start(options, std::make_shared<prometheus::Registry>());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--listen="));
}

TEST_F(ListenersTest, TakenMetricsPortIsRefused) {
  StartServer(MetricsOptions());
  ServerOptions options = TestOptions();
  options.metrics_listen = listeners_->metrics_address();
  const auto second =
      Listeners::Start(options, std::make_shared<prometheus::Registry>());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr("--metrics-listen="));
}

TEST_F(ListenersTest, PortFileHoldsBothAddresses) {
  const TempFolder folder;
  ServerOptions options = MetricsOptions();
  options.port_file = folder.path() + "/ports";
  StartServer(options);
  std::ifstream file(options.port_file);
  std::string grpc_address;
  std::string metrics_address;
  std::getline(file, grpc_address);
  std::getline(file, metrics_address);
  EXPECT_EQ(grpc_address, listeners_->address());
  EXPECT_EQ(metrics_address, listeners_->metrics_address());
  EXPECT_THAT(grpc_address, Not(HasSubstr(":0")));
}

TEST_F(ListenersTest, UnwritablePortFileIsRefused) {
  ServerOptions options = TestOptions();
  options.port_file = "/no/such/folder/ports";
  const auto server =
      Listeners::Start(options, std::make_shared<prometheus::Registry>());
  EXPECT_THAT(std::string(server.status().message()),
              HasSubstr("--port-file=/no/such/folder/ports"));
}

TEST_F(ListenersTest, StopsWithoutWaitingForTheMetricsPage) {
  for (const char* listen : {"127.0.0.1:0", "0.0.0.0:0"}) {
    ServerOptions options = TestOptions();
    options.metrics_listen = listen;
    StartServer(options);
    const absl::Time start = absl::Now();
    listeners_->Shutdown(absl::ZeroDuration());
    EXPECT_LT(absl::Now() - start, absl::Seconds(1)) << listen;
  }
}

TEST_F(ListenersTest, StopsWithoutWaitingForIdleClients) {
  StartReadyServer();  // channel_ stays connected.
  const absl::Time start = absl::Now();
  listeners_->Shutdown(absl::Seconds(5));
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
}

TEST_F(ListenersTest, OpenCallsHaveTheGraceToEnd) {
  StartReadyServer();
  engine_.Hold();
  grpc::Status accepted;
  std::thread worker([&] { accepted = Send(GoodStep()); });
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_waiting == 1; }));
  std::thread stopper([&] { listeners_->Shutdown(absl::Seconds(5)); });
  absl::SleepFor(absl::Milliseconds(300));
  engine_.Release();
  worker.join();
  stopper.join();
  EXPECT_TRUE(accepted.ok()) << accepted.error_message();
}

TEST_F(ListenersTest, ProbesAndTheEdgeAskTheMetricsPort) {
  StartServer(MetricsOptions());
  EXPECT_EQ(Fetch("/livez"), "200 SERVING\n");
  EXPECT_EQ(Fetch("/readyz"), "503 NOT_SERVING\n");
  AttachEngine();
  EXPECT_EQ(Fetch("/readyz?verbose"), "200 SERVING\n");
  EXPECT_EQ(Fetch("/authorize"), "204 ") << "this server has no tokens";
  engine_.HangSince(absl::Now() - kHeartbeatLimit - absl::Seconds(1));
  listeners_->UpdateLiveness(absl::Now());
  EXPECT_EQ(Fetch("/livez"), "503 NOT_SERVING\n");
  listeners_->StartDraining();
  EXPECT_EQ(Fetch("/readyz"), "503 NOT_SERVING\n");
  EXPECT_THAT(Fetch("/"), ::testing::StartsWith("404 "));
}

// A parser that follows every level would use up its stack.
TEST_F(ListenersTest, NestedMessagesAreRefused) {
  StartServer();
  grpc::GenericStub stub(channel_);
  const std::string groups(1 << 20, '\x0b');  // Each begins a group of field 1.
  const grpc::Slice sent(groups);
  const grpc::ByteBuffer request(&sent, 1);
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/weft.v1.ServerService/GetInfo",
                 grpc::StubOptions(), &request, &response,
                 [&](grpc::Status status) { done.set_value(status); });
  EXPECT_FALSE(done.get_future().get().ok());
  EXPECT_EQ(Info().model().name(), "toy");
}

TEST_F(ListenersTest, ListensOnAUnixSocketAndLeavesNoFile) {
  const TempFolder folder;
  const std::string path = folder.path() + "/socket";
  ServerOptions options = TestOptions();
  options.listen = "unix:" + path;
  StartServer(options);
  EXPECT_EQ(listeners_->address(), options.listen);
  EXPECT_EQ(Health("liveness"), kServing);
  const auto second =
      Listeners::Start(options, std::make_shared<prometheus::Registry>());
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr("another server listens there"));
  EXPECT_EQ(Health("liveness"), kServing);
  listeners_.reset();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(ListenersTest, EmptyMetricsAddressMeansNoEndpoint) {
  ServerOptions options = TestOptions();
  options.metrics_listen = "";
  StartServer(options);
  EXPECT_EQ(listeners_->metrics_address(), "");
}

}  // namespace
}  // namespace weft::server
