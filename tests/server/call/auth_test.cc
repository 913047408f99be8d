// Tests tokens over a connection: which calls are permitted, and which names
// callers see.

#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/generic/generic_stub.h"
#include "server/call/rpc_policy.h"
#include "src/base/files/token_file.h"
#include "src/base/reason.h"
#include "tests/server/server_fixture.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class AuthTest : public ServerTest {
 protected:
  // Adds a token with these scopes to the file and returns it.
  std::string AddToken(const std::string& id, const std::string& tenant,
                       std::set<Scope> scopes,
                       absl::Time expires = absl::InfiniteFuture()) {
    const std::string token = NewToken();
    records_.push_back({.id = id,
                        .sha256 = HashToken(token),
                        .tenant = tenant,
                        .scopes = std::move(scopes),
                        .expires = expires});
    EXPECT_THAT(WriteTokenFile(file_, records_), IsOk());
    return token;
  }

  void StartWithTokens() {
    ServerOptions options = TestOptions();
    options.auth_tokens_file = file_;
    StartServer(options);
    AttachEngine();
  }

  static void Bear(grpc::ClientContext* context, const std::string& token) {
    if (!token.empty())
      context->AddMetadata("authorization", "Bearer " + token);
  }

  // Calls a method with a message: by default an empty one, which every method
  // can parse.
  grpc::Status Call(const std::string& path, const std::string& token,
                    const std::string& message = "") {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
    Bear(&context, token);
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareCall(&context, path, &queue);
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(this);
    queue.Next(&tag, &ok);
    const grpc::Slice bytes(message);
    call->WriteLast(grpc::ByteBuffer(&bytes, 1), grpc::WriteOptions(), this);
    queue.Next(&tag, &ok);
    grpc::ByteBuffer reply;
    call->Read(&reply, this);
    queue.Next(&tag, &ok);
    // A first message means that the call was permitted. Watch never ends, so
    // its status is not awaited.
    if (ok && absl::EndsWith(path, "Watch")) return grpc::Status::OK;
    grpc::Status status;
    call->Finish(&status, this);
    queue.Next(&tag, &ok);
    return status;
  }

  grpc::Status Create(const std::string& id, const std::string& token,
                      const std::string& tenant = "",
                      v1::Adapter* adapter = nullptr) {
    grpc::ClientContext context;
    Bear(&context, token);
    v1::CreateAdapterRequest request;
    request.set_adapter_id(id);
    request.set_tenant(tenant);
    v1::CreateAdapterResponse response;
    const grpc::Status status =
        adapters_->CreateAdapter(&context, request, &response);
    if (adapter != nullptr) *adapter = response.adapter();
    return status;
  }

  std::vector<std::string> List(const std::string& token) {
    grpc::ClientContext context;
    Bear(&context, token);
    v1::ListAdaptersResponse response;
    EXPECT_TRUE(
        adapters_->ListAdapters(&context, v1::ListAdaptersRequest(), &response)
            .ok());
    std::vector<std::string> ids;
    for (const v1::Adapter& adapter : response.adapters()) {
      ids.push_back(adapter.adapter_id());
    }
    return ids;
  }

  const TempFolder folder_;
  const std::string file_ = folder_.path() + "/tokens";
  std::vector<TokenEntry> records_;
};

// Returns every method of every service on the server. The descriptor of the
// health service is not linked in, so its methods are listed here.
std::vector<std::string> AllMethods() {
  std::vector<std::string> paths = {"/grpc.health.v1.Health/Check",
                                    "/grpc.health.v1.Health/Watch"};
  const auto* const pool = google::protobuf::DescriptorPool::generated_pool();
  for (const char* const name :
       {"weft.v1.TrainingService", "weft.v1.SamplingService",
        "weft.v1.AdapterService", "weft.v1.ServerService",
        "grpc.reflection.v1alpha.ServerReflection"}) {
    const auto* const service = pool->FindServiceByName(name);
    EXPECT_NE(service, nullptr) << name;
    for (int i = 0; service != nullptr && i < service->method_count(); ++i) {
      paths.push_back(absl::StrCat("/", name, "/", service->method(i)->name()));
    }
  }
  return paths;
}

TEST(RpcPolicyTest, EveryMethodHasOne) {
  // The package has exactly the services that AllMethods names.
  const auto* const pool = google::protobuf::DescriptorPool::generated_pool();
  int services = 0;
  for (const char* const file :
       {"adapters", "sampling", "server", "training"}) {
    services += pool->FindFileByName(absl::StrCat("weft/v1/", file, ".proto"))
                    ->service_count();
  }
  EXPECT_EQ(services, 4);
  const std::vector<std::string> paths = AllMethods();
  EXPECT_EQ(paths.size(), 32u);
  for (const std::string& path : paths) {
    EXPECT_NE(FindPolicy(path), nullptr) << path;
  }
  EXPECT_EQ(FindPolicy("/weft.v1.ServerService/Drain")->scope, Scope::kAdmin);
  for (const char* const method :
       {"Undrain", "DrainLog", "WriteSnapshot", "Profile"}) {
    const std::string path = absl::StrCat("/weft.v1.ServerService/", method);
    EXPECT_EQ(FindPolicy(path)->scope, Scope::kAdmin) << path;
  }
  EXPECT_EQ(FindPolicy("/weft.v1.AdapterService/MoveAdapter")->scope,
            Scope::kAdmin);
  EXPECT_EQ(FindPolicy("/weft.v1.ServerService/None"), nullptr);
}

TEST_F(AuthTest, AMessageThatGrowsWhenItIsParsedIsRefusedUnparsed) {
  const std::string token =
      AddToken("ci", "acme", {Scope::kTrain, Scope::kSample});
  StartWithTokens();
  const auto many = [](size_t count, const std::string& part) {
    std::string all;
    for (size_t i = 0; i < count; ++i) all += part;
    return all;
  };
  // Empty data, and fields that no message has; each takes two bytes.
  const std::string data = many(1 << 20, std::string("\x1a\x00", 2));
  const std::string unknown = many(1 << 20, std::string("\x7a\x00", 2));
  for (const std::string& message : {data, unknown}) {
    const grpc::Status status =
        Call("/weft.v1.TrainingService/ForwardBackward", token, message);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(),
                HasSubstr("the 2097152 bytes of this ForwardBackwardRequest "
                          "have so many small parts"));
  }
  // A method without data takes small messages only.
  const grpc::Status info =
      Call("/weft.v1.ServerService/GetInfo", token, unknown);
  EXPECT_EQ(info.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(info.error_message(),
              HasSubstr("the request has 2097152 bytes, must have at most "
                        "262144 for weft.v1.ServerService/GetInfo"));
  EXPECT_EQ(
      Call("/weft.v1.SamplingService/Sample", token, "\x0a\x05?").error_code(),
      grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(Call("/weft.v1.ServerService/GetInfo", token).ok());
}

TEST_F(AuthTest, NoMethodAnswersWithoutAToken) {
  AddToken("ci", "acme", {Scope::kTrain});
  StartWithTokens();
  std::vector<std::string> paths = AllMethods();
  paths.push_back("/weft.v1.ServerService/None");
  paths.push_back("/grpc.channelz.v1.Channelz/GetServers");
  for (const std::string& path : paths) {
    for (const char* const token : {"", "weft_stale", "ci"}) {
      const grpc::Status status = Call(path, token);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED)
          << path << " " << status.error_message();
    }
  }
  EXPECT_GT(MetricValue("weft_auth_failures_total{reason=\"no_token\"}"), 20);
  EXPECT_GT(MetricValue("weft_auth_failures_total{reason=\"unknown_token\"}"),
            20);
  EXPECT_TRUE(engine_.seen().arrived.empty());
}

TEST_F(AuthTest, EachScopeOpensItsOwnMethods) {
  const std::pair<Scope, std::string> tokens[] = {
      {Scope::kRead, AddToken("reader", "acme", {Scope::kRead})},
      {Scope::kSample, AddToken("sampler", "acme", {Scope::kSample})},
      {Scope::kTrain, AddToken("trainer", "acme", {Scope::kTrain})}};
  StartWithTokens();
  for (const auto& [scope, token] : tokens) {
    for (const std::string& path : AllMethods()) {
      const RpcPolicy& policy = *FindPolicy(path);
      const bool may = policy.scope == Scope::kRead || policy.scope == scope;
      const grpc::Status status = Call(path, token);
      EXPECT_EQ(status.error_code() == grpc::StatusCode::PERMISSION_DENIED,
                !may)
          << ScopeName(scope) << " " << path << " " << status.error_message();
      EXPECT_NE(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << path;
    }
  }
  EXPECT_FALSE(listeners_->draining());
  const std::string admin = AddToken("ops", "ops", {Scope::kAdmin});
  EXPECT_TRUE(Eventually(
      [&] { return Call("/weft.v1.ServerService/Drain", admin).ok(); }));
  EXPECT_TRUE(listeners_->draining());
}

TEST_F(AuthTest, TheEdgeLearnsWhetherATokenIsGood) {
  const std::string good = AddToken("good", "acme", {Scope::kRead});
  const std::string old =
      AddToken("old", "acme", {Scope::kTrain}, absl::Now() - absl::Seconds(1));
  ServerOptions options = MetricsOptions();
  options.auth_tokens_file = file_;
  StartServer(options);
  EXPECT_EQ(Fetch("/authorize", "Bearer " + good), "204 ");
  EXPECT_THAT(Fetch("/authorize", "Bearer " + old), HasSubstr("401 the token"));
  EXPECT_THAT(Fetch("/authorize", "Bearer weft_no"),
              HasSubstr("401 the token"));
  EXPECT_THAT(Fetch("/authorize"), HasSubstr("401 a bearer token is needed"));
  EXPECT_EQ(MetricValue("weft_auth_failures_total{reason=\"no_token\"}"), 1);
}

TEST_F(AuthTest, TheEdgeLearnsWhoHasAnAdapter) {
  const std::string acme = AddToken("good", "acme", {Scope::kRead});
  const std::string other = AddToken("other", "other", {Scope::kRead});
  const std::string admin = AddToken("ops", "ops", {Scope::kAdmin});
  ServerOptions options = MetricsOptions();
  options.auth_tokens_file = file_;
  StartServer(options);
  engine_.SetOwners({}, {{"acme~x", "one:1"}});
  const auto owner = [&](const std::string& token, const std::string& adapter,
                         const std::string& door = "weft-door: 1\r\n") {
    return FetchAll("/authorize", absl::StrCat("Authorization: Bearer ", token,
                                               "\r\nweft-adapter-id: ", adapter,
                                               "\r\n", door));
  };
  EXPECT_THAT(owner(acme, "x"), Not(HasSubstr("weft-owner")));
  // A standby names the one for which it stands by.
  listeners_->SetStandby("zero:1");
  EXPECT_THAT(owner(other, ""), HasSubstr("weft-owner: zero:1"));
  AttachEngine();
  EXPECT_THAT(owner(acme, "x"), HasSubstr("weft-owner: one:1"));
  EXPECT_THAT(owner(admin, "acme~x"), HasSubstr("weft-owner: one:1"));
  // Names are the tenant's. Who cannot send a call on gets no address.
  for (const std::string& reply : {owner(other, "x"), owner(acme, "y"),
                                   owner(acme, ""), owner(acme, "x", "")}) {
    EXPECT_THAT(reply, HasSubstr(" 204 "));
    EXPECT_THAT(reply, Not(HasSubstr("weft-owner")));
  }
  EXPECT_THAT(owner("weft_no", "x"), HasSubstr(" 401 "));
}

TEST_F(AuthTest, TheEdgeLearnsWhoSamplesFromACheckpoint) {
  const std::string acme = AddToken("good", "acme", {Scope::kSample});
  ServerOptions options = MetricsOptions();
  options.auth_tokens_file = file_;
  StartServer(options);
  engine_.SetOwners({}, {{"acme~x", "one:1"}});
  const auto reply = [&](const std::string& method,
                         const std::string& checkpoint,
                         const std::string& door = "weft-door: 1\r\n") {
    return FetchAll(
        "/authorize",
        absl::StrCat("Authorization: Bearer ", acme, "\r\nX-Original-URI: ",
                     "/weft.v1.", method, "\r\nweft-adapter-id: x\r\n",
                     "weft-checkpoint: ", checkpoint, "\r\n", door));
  };
  constexpr char kSample[] = "SamplingService/Sample";
  listeners_->SetStandby("zero:1");
  EXPECT_THAT(reply(kSample, "c"), HasSubstr("weft-owner: zero:1"));
  AttachEngine();
  // Here, though another has the adapter.
  EXPECT_THAT(reply(kSample, "c"), Not(HasSubstr("weft-owner")));
  engine_.SetSampler("two:1");
  EXPECT_THAT(reply(kSample, "c"), HasSubstr("weft-owner: two:1"));
  EXPECT_THAT(reply("SamplingService/SampleStream", "c"),
              HasSubstr("weft-owner: two:1"));
  // All other calls go to the adapter, and none goes two hops.
  EXPECT_THAT(reply(kSample, ""), HasSubstr("weft-owner: one:1"));
  EXPECT_THAT(reply("AdapterService/GetAdapter", "c"),
              HasSubstr("weft-owner: one:1"));
  EXPECT_THAT(reply(kSample, "c", ""), Not(HasSubstr("weft-owner")));
}

TEST_F(AuthTest, ExpiredAndRevokedTokensAreRefused) {
  const std::string old =
      AddToken("old", "acme", {Scope::kTrain}, absl::Now() - absl::Seconds(1));
  const std::string good = AddToken("good", "acme", {Scope::kTrain});
  StartWithTokens();
  const std::string path = "/weft.v1.ServerService/GetInfo";
  EXPECT_THAT(Call(path, old).error_message(), HasSubstr("expired"));
  EXPECT_TRUE(Call(path, good).ok());
  records_.pop_back();
  ASSERT_THAT(WriteTokenFile(file_, records_), IsOk());
  EXPECT_TRUE(Eventually([&] {
    return Call(path, good).error_code() == grpc::StatusCode::UNAUTHENTICATED;
  }));
}

TEST_F(AuthTest, ABadFileLeavesTheTokensAsTheyWere) {
  const std::string good = AddToken("good", "acme", {Scope::kTrain});
  StartWithTokens();
  std::ofstream(file_) << "no json\n";
  absl::SleepFor(absl::Milliseconds(1200));
  EXPECT_TRUE(Call("/weft.v1.ServerService/GetInfo", good).ok());
  std::filesystem::remove(file_);
  absl::SleepFor(absl::Milliseconds(700));
  EXPECT_TRUE(Call("/weft.v1.ServerService/GetInfo", good).ok());
}

TEST_F(AuthTest, AServerWithoutItsTokensDoesNotStart) {
  ServerOptions options = TestOptions();
  options.auth_tokens_file = file_;
  std::ofstream(file_) << "no json\n";
  const auto listeners =
      Listeners::Start(options, std::make_shared<prometheus::Registry>());
  EXPECT_THAT(listeners, IsStatus(absl::StatusCode::kInvalidArgument,
                                  "--auth-tokens-file: line 1"));
}

TEST_F(AuthTest, ATokenBelongsToItsCallNotToTheConnection) {
  const std::string a = AddToken("a", "acme", {Scope::kTrain});
  const std::string b = AddToken("b", "birch", {Scope::kTrain});
  StartWithTokens();
  EXPECT_TRUE(Create("x", a).ok());
  EXPECT_TRUE(Create("y", b).ok());
  EXPECT_THAT(List(a), ::testing::ElementsAre("x"));
  EXPECT_THAT(List(b), ::testing::ElementsAre("y"));
  EXPECT_EQ(Call("/weft.v1.ServerService/GetInfo", "").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(AuthTest, TenantsHaveNamesOfTheirOwn) {
  const std::string a = AddToken("a", "acme", {Scope::kTrain});
  const std::string b = AddToken("b", "birch", {Scope::kTrain});
  const std::string admin = AddToken("ops", "ops", {Scope::kAdmin});
  StartWithTokens();
  v1::Adapter adapter;
  EXPECT_TRUE(Create("x", a, "", &adapter).ok());
  EXPECT_EQ(adapter.adapter_id(), "x");
  EXPECT_EQ(adapter.tenant(), "acme");
  EXPECT_TRUE(Create("x", b, "birch", &adapter).ok());
  EXPECT_EQ(adapter.tenant(), "birch");
  EXPECT_EQ(Create("y", a, "birch").error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  // Only an admin may use the engine's names, which are TENANT~ID.
  EXPECT_EQ(Create("birch~y", a).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(Create("birch~z", admin, "", &adapter).ok());
  EXPECT_EQ(adapter.tenant(), "birch");
  EXPECT_EQ(Create("birch~w", admin, "acme").error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(List(admin),
              ::testing::ElementsAre("acme~x", "birch~x", "birch~z"));
  EXPECT_THAT(List(b), ::testing::ElementsAre("x", "z"));
}

TEST_F(AuthTest, ATenantHasAQuotaOfCallsAndOfTokens) {
  const std::string a = AddToken("a", "acme", {Scope::kTrain});
  const std::string b = AddToken("b", "birch", {Scope::kTrain});
  ServerOptions options = TestOptions();
  options.auth_tokens_file = file_;
  options.max_calls_per_tenant = 2;
  options.max_tokens_per_second_per_tenant = 1;  // A burst of ten tokens is
                                                 // permitted.
  StartServer(options);
  AttachEngine();
  ASSERT_TRUE(Create("a", a).ok());
  ASSERT_TRUE(Create("a", b).ok());
  const auto train = [this](const std::string& token) {
    grpc::ClientContext context;
    Bear(&context, token);
    v1::ForwardBackwardResponse response;
    return training_->ForwardBackward(&context, GoodStep(), &response);
  };
  engine_.Hold();
  grpc::Status first;
  grpc::Status second;
  std::thread one([&] { first = train(a); });
  std::thread two([&] { second = train(a); });
  EXPECT_TRUE(Eventually([&] { return engine_.seen().num_waiting == 2; }));
  const grpc::Status refused = train(a);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("--max-calls-per-tenant"));
  grpc::ClientContext context;  // This call does not need the engine.
  Bear(&context, b);
  const auto get = Make<v1::GetAdapterRequest>("adapter_id = 'a'");
  v1::GetAdapterResponse got;
  EXPECT_TRUE(adapters_->GetAdapter(&context, get, &got).ok());
  engine_.Release();
  one.join();
  two.join();
  EXPECT_TRUE(first.ok() && second.ok());
  // Six tokens are spent, and each step costs three. The fourth step goes into
  // debt, so the next step is refused.
  EXPECT_TRUE(train(a).ok());
  EXPECT_TRUE(train(a).ok());
  const grpc::Status over = train(a);
  EXPECT_EQ(over.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(over.error_message(),
              HasSubstr("--max-tokens-per-second-per-tenant"));
  EXPECT_TRUE(train(b).ok());
}

TEST_F(AuthTest, ATenantsImportsHoldHalfAndTellNothingOfOthers) {
  const std::string a = AddToken("a", "acme", {Scope::kTrain});
  const std::string b = AddToken("b", "birch", {Scope::kTrain});
  StartWithTokens();
  const auto options =
      Make<v1::ImportAdapterRequest>("options.adapter_id = 'x'");
  auto chunk =
      Make<v1::ImportAdapterRequest>("chunk.name = 'adapter_config.json'");
  chunk.mutable_chunk()->set_data(std::string(1000 << 10, ' '));
  const auto send = [&](grpc::ClientWriter<v1::ImportAdapterRequest>* stream,
                        int chunks) {
    bool ok = stream->Write(options);
    for (int i = 0; i < chunks; ++i) ok = ok && stream->Write(chunk);
    return ok;
  };
  v1::ImportAdapterResponse response;
  grpc::ClientContext stalls;
  Bear(&stalls, a);
  const auto stalled = adapters_->ImportAdapter(&stalls, &response);
  ASSERT_TRUE(send(stalled.get(), 2));  // Nearly half of 4 MiB.
  ASSERT_TRUE(Eventually([&] {
    return MetricValue(
               "grpc_server_msg_received_total{"
               "grpc_method=\"ImportAdapter\","
               "grpc_service=\"weft.v1.AdapterService\","
               "grpc_type=\"client_stream\"}") >= 3;
  }));
  const auto import = [&](const std::string& token) {
    grpc::ClientContext context;
    Bear(&context, token);
    v1::ImportAdapterResponse ignored;
    const auto stream = adapters_->ImportAdapter(&context, &ignored);
    send(stream.get(), 1);
    stream->WritesDone();
    return stream->Finish();
  };
  const grpc::Status refused = import(a);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(),
              HasSubstr("this call has sent 1024000 bytes; imports and uploads "
                        "under way may hold 2097152 of one tenant"));
  const grpc::Status other = import(b);
  EXPECT_TRUE(other.ok()) << other.error_message();
  stalls.TryCancel();
  (void)stalled->Finish();
}

TEST_F(AuthTest, ManyCallsThatNeverSendTheirRequestAreRefused) {
  const std::string a = AddToken("a", "acme", {Scope::kRead});
  const std::string b = AddToken("b", "birch", {Scope::kRead});
  StartWithTokens();
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  const auto begin = [&](const std::string& token) {
    grpc::ClientContext context;
    Bear(&context, token);
    context.set_wait_for_ready(true);
    const auto call =
        stub.PrepareCall(&context, "/weft.v1.ServerService/GetInfo", &queue);
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(this);
    queue.Next(&tag, &ok);
    context.TryCancel();
    grpc::Status status;
    call->Finish(&status, this);
    queue.Next(&tag, &ok);
  };
  for (int i = 0; i < 1200; ++i) begin(a);
  const grpc::Status refused = Call("/weft.v1.ServerService/GetInfo", a);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // While the server has yet to see which calls have ended, another limit may
  // come first.
  EXPECT_THAT(refused.error_message(),
              ::testing::AnyOf(HasSubstr("has begun 1024 calls"),
                               HasSubstr("1024 of your calls wait")));
  EXPECT_TRUE(Call("/weft.v1.ServerService/GetInfo", b).ok());
}

TEST_F(AuthTest, CallsThatComputeNothingCostNoTokens) {
  const std::string a = AddToken("a", "acme", {Scope::kTrain});
  ServerOptions options = TestOptions();
  options.auth_tokens_file = file_;
  options.max_tokens_per_second_per_tenant = 1;  // A burst of ten tokens.
  options.max_data_per_request = 100;
  options.max_tokens_per_request = 300;
  StartServer(options);
  AttachEngine();
  ASSERT_TRUE(Create("a", a).ok());
  const auto train = [&](uint64_t step, int num_data = 1) {
    grpc::ClientContext context;
    Bear(&context, a);
    v1::ForwardBackwardRequest request = GoodStep();
    request.set_step(step);
    for (int i = 1; i < num_data; ++i) *request.add_data() = request.data(0);
    v1::ForwardBackwardResponse response;
    return training_->ForwardBackward(&context, request, &response);
  };
  // A datum costs three tokens. There is no room for the log of the first
  // calls, and the engine answers the later ones from the stored reply.
  const absl::Status full =
      WithReason(absl::ResourceExhaustedError("the disk is full"),
                 {.name = "STATE_DISK_FULL", .values = {}});
  const absl::Status away =
      WithReason(absl::UnavailableError("the store does not answer"),
                 {.name = "STATE_STORE_UNREACHABLE", .values = {}});
  const absl::Status in_use =
      WithReason(absl::ResourceExhaustedError("samples use all"),
                 {.name = "SAMPLER_CACHE_FULL", .values = {}});
  for (int i = 0; i < 18; ++i) {
    const absl::Status& refusal = std::array{full, away, in_use}[i / 6];
    engine_.FailNext(refusal);
    EXPECT_EQ(train(1).error_message(), refusal.message());
  }
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(train(1).ok());
  EXPECT_TRUE(train(2).ok());
  EXPECT_TRUE(train(3, /*num_data=*/100).ok());
  EXPECT_THAT(train(4).error_message(),
              HasSubstr("--max-tokens-per-second-per-tenant"));
}

TEST_F(AuthTest, MessagesHaveTheCallersNames) {
  const std::string a = AddToken("a", "acme", {Scope::kTrain});
  StartWithTokens();
  grpc::ClientContext context;
  Bear(&context, a);
  const auto request = Make<v1::GetAdapterRequest>("adapter_id = 'x'");
  v1::GetAdapterResponse response;
  const grpc::Status status =
      adapters_->GetAdapter(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("'x'"));
  EXPECT_THAT(status.error_message(), Not(HasSubstr("acme~")));
  // The ErrorInfo in the details has the caller's names, too.
  EXPECT_THAT(status.error_details(), HasSubstr("google.rpc.ErrorInfo"));
  EXPECT_THAT(status.error_details(), Not(HasSubstr("acme~")));
}

}  // namespace
}  // namespace weft::server
