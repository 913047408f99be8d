#include "tests/server/tinker/tinker_front_fixture.h"

#include <algorithm>
#include <latch>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/tinker/adapters.h"
#include "server/tinker/ledger.h"
#include "server/tinker/routes.h"
#include "src/base/files/token_file.h"
#include "src/base/observe/log.h"
#include "tests/support/status_matchers.h"

namespace weft::server::tinker {

TinkerFrontTest::TinkerFrontTest() { SetLogLevel(LogLevel::kError); }

TinkerFrontTest::~TinkerFrontTest() {
  StopFront();
  engine_.reset();
}

std::string TinkerFrontTest::AddKey(const std::string& id,
                                    std::set<Scope> scopes,
                                    const std::string& tenant) {
  const std::string token = NewToken();
  records_.push_back({.id = id,
                      .sha256 = HashToken(token),
                      .tenant = tenant,
                      .scopes = std::move(scopes)});
  return absl::StrCat(kKeyPrefix, token);
}

void TinkerFrontTest::Start(ServerOptions options) {
  options_ = std::move(options);
  options_.model_name = "toy";
  options_.keeps_state = keeps_;
  if (!records_.empty()) {
    options_.auth_tokens_file = folder_.path() + "/tokens";
    ASSERT_THAT(WriteTokenFile(options_.auth_tokens_file, records_), IsOk());
  }
  StartFront();
}

void TinkerFrontTest::Restart() {
  StopFront();
  StartFront();
}

void TinkerFrontTest::RestartAll() {
  StopFront();
  Notes notes = engine_->NotesWith("");
  engine_ = std::make_unique<CannedEngine>();
  engine_->SetNotes(std::move(notes));
  StartFront();
}

void TinkerFrontTest::StartFront() {
  if (engine_ == nullptr) engine_ = std::make_unique<CannedEngine>();
  registry_ = std::make_unique<prometheus::Registry>();
  core_ = std::make_unique<ServiceCore>(options_, registry_.get());
  if (!records_.empty()) {
    core_->authenticator =
        Authenticator::Start(options_.auth_tokens_file, registry_.get())
            .value();
  }
  core_->engine.Set(engine_.get());
  server_ = HttpServer::Bind("listen", "127.0.0.1:0", HttpOptions()).value();
  HttpServer* const raw = server_.get();
  front_ = std::make_unique<Front>(
      core_.get(), server_,
      [raw](absl::Duration delay, std::function<void()> work) {
        raw->After(delay, std::move(work));
      });
  server_->Start([this](const HttpRequest& header) {
    return tinker::Admit(*front_, header);
  });
  OnFront([](Front& front) {
    RestoreSecret(front, [&front] {
      RestoreTables(front);
      RestoreSteps(front);
      front.adapters.SweepDeletions();
    });
  });
  EXPECT_TRUE(EventuallyInFront([](Front& front) { return front.ready; }));
}

void TinkerFrontTest::StopFront() {
  if (server_ == nullptr) return;
  server_->Stop();
  front_.reset();
  server_.reset();
  // The engine's threads may still hold calls, which use the core.
  if (engine_ != nullptr) engine_->Release();
  EXPECT_TRUE(Eventually([this] { return core_->open_calls == 0; }));
  core_.reset();
}

void TinkerFrontTest::OnFront(const std::function<void(Front&)>& work) {
  std::latch done(1);
  server_->Post([&] {
    work(*front_);
    done.count_down();
  });
  done.wait();
}

std::future<HttpReply> TinkerFrontTest::AskLater(const std::string& method,
                                                 const std::string& path,
                                                 const Json& body) {
  return SendLater({.method = method,
                    .target = absl::StrCat("/api/v1/", path),
                    .api_key = key_,
                    .idempotency_key = idempotency_key_,
                    .content_type = kJsonType,
                    .host = "front:80",
                    .forwarded_proto = forwarded_proto_,
                    .door = door_,
                    .peer = "127.0.0.1:9"},
                   body.dump());
}

HttpReply TinkerFrontTest::Send(const std::string& path,
                                const std::string& type,
                                const std::string& encoding,
                                const std::string& body) {
  return SendLater({.method = "POST",
                    .target = absl::StrCat("/api/v1/", path),
                    .api_key = key_,
                    .content_type = type,
                    .content_encoding = encoding,
                    .host = "front:80"},
                   body)
      .get();
}

std::future<HttpReply> TinkerFrontTest::SendLater(HttpRequest request,
                                                  std::string body) {
  const auto reply = std::make_shared<std::promise<HttpReply>>();
  server_->Post([this, request = std::move(request), text = std::move(body),
                 reply]() mutable {
    const Admission admission = tinker::Admit(*front_, request);
    if (admission.refusal) return reply->set_value(*admission.refusal);
    request.body = std::move(text);
    admission.serve(std::move(request), [reply](HttpReply answer) {
      reply->set_value(std::move(answer));
    });
  });
  return reply->get_future();
}

HttpReply TinkerFrontTest::Ask(const std::string& method,
                               const std::string& path, const Json& body) {
  return AskLater(method, path, body).get();
}

Json TinkerFrontTest::Post(const std::string& path, const Json& body) {
  const HttpReply reply = Ask("POST", path, body);
  EXPECT_EQ(reply.status, 200) << path << " " << reply.body;
  return Json::parse(reply.body);
}

Json TinkerFrontTest::Result(const Json& promise) {
  return Post("retrieve_future", {{"request_id", promise["request_id"]}});
}

std::string TinkerFrontTest::NewSession() {
  return Post("create_session")["session_id"];
}

std::string TinkerFrontTest::StartSession() {
  Start();
  return NewSession();
}

std::future<HttpReply> TinkerFrontTest::CreateModelLater(
    const std::string& session, int number) {
  return AskLater("POST", "create_model",
                  {{"session_id", session},
                   {"model_seq_id", number},
                   {"base_model", "toy"},
                   {"user_metadata", {{"of", key_}}},
                   {"lora_config", {{"rank", 4}, {"seed", 3}}}});
}

Json TinkerFrontTest::CreateModel(const std::string& session, int number) {
  const HttpReply reply = CreateModelLater(session, number).get();
  EXPECT_EQ(reply.status, 200) << reply.body;
  return Json::parse(reply.body);
}

std::future<HttpReply> TinkerFrontTest::TrainLater(const std::string& model,
                                                   int seq) {
  const Json targets = {
      {"data", {4, 5}}, {"dtype", "int64"}, {"shape", Json::array({2})}};
  const Json datum = {{"model_input", Prompt({3, 4})},
                      {"loss_fn_inputs", {{"target_tokens", targets}}}};
  return AskLater(
      "POST", "forward_backward",
      {{"model_id", model},
       {"seq_id", seq},
       {"forward_backward_input",
        {{"data", Json::array({datum})}, {"loss_fn", "cross_entropy"}}}});
}

Json TinkerFrontTest::Train(const std::string& model, int seq) {
  const HttpReply reply = TrainLater(model, seq).get();
  EXPECT_EQ(reply.status, 200) << reply.body;
  return Json::parse(reply.body);
}

std::string TinkerFrontTest::SaveSampler(const std::string& session) {
  const std::string model = Result(CreateModel(session))["model_id"];
  return Result(
      Post("save_weights_for_sampler",
           {{"model_id", model}, {"seq_id", 1}, {"path", "kept"}}))["path"];
}

std::string TinkerFrontTest::SaveExternal() {
  const std::string model = Result(CreateModel(NewSession()))["model_id"];
  Result(Post("save_weights_external",
              {{"model_id", model}, {"seq_id", 1}, {"path", "out"}}));
  return absl::StrCat(
      "training_runs/", model,
      "/checkpoints/external_weights/out/external_weights_urls");
}

Json TinkerFrontTest::Prompt(const std::vector<int>& tokens) {
  const Json chunk = {{"type", "encoded_text"}, {"tokens", tokens}};
  return {{"chunks", Json::array({chunk})}};
}

std::string TinkerFrontTest::NewSampler(const std::string& session,
                                        int number) {
  return Post("create_sampling_session",
              {{"session_id", session},
               {"sampling_session_seq_id", number},
               {"base_model", "toy"}})["sampling_session_id"];
}

Json TinkerFrontTest::Sample(const Json& fields) {
  Json body = {{"prompt", Prompt({3, 4})},
               {"sampling_params", {{"max_tokens", 2}}}};
  body.update(fields);
  return Post("asample", body);
}

void TinkerFrontTest::Finish(const std::string& session) {
  Post(absl::StrCat("sessions/", session, "/finish"));
}

std::future<HttpReply> TinkerFrontTest::SampleFromLater(
    const std::string& session, const std::string& path, int number) {
  return AskLater("POST", "create_sampling_session",
                  {{"session_id", session},
                   {"sampling_session_seq_id", number},
                   {"model_path", path}});
}

HttpReply TinkerFrontTest::SampleFrom(const std::string& session,
                                      const std::string& path, int number) {
  return SampleFromLater(session, path, number).get();
}

int TinkerFrontTest::Calls(const std::string& rpc) const {
  return static_cast<int>(std::ranges::count(engine_->seen().arrived, rpc,
                                             &CannedEngine::Call::first));
}

bool TinkerFrontTest::Eventually(const std::function<bool()>& condition) {
  const absl::Time limit = absl::Now() + absl::Seconds(30);
  while (!condition()) {
    if (absl::Now() > limit) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

bool TinkerFrontTest::EventuallyInFront(
    const std::function<bool(Front&)>& condition) {
  return Eventually([&] {
    bool is_true = false;
    OnFront([&](Front& front) { is_true = condition(front); });
    return is_true;
  });
}

void TinkerFrontTest::AwaitDeletions() {
  EXPECT_TRUE(EventuallyInFront(
      [](Front& front) { return front.adapters.num_deletions() == 0; }));
}

}  // namespace weft::server::tinker
