// Tests the Tinker front's handlers in cases that the SDK does not cause:
// refused and repeated deletions, restarts, drains, quotas.
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/adapters.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "src/base/reason.h"
#include "tests/server/tinker/tinker_front_fixture.h"
#include "tests/support/canned_results.h"
#include "tests/support/status_matchers.h"

namespace weft::server::tinker {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class TinkerEndsTest : public TinkerFrontTest {
 protected:
  // Adds silent sessions, up to kMaxSessions. The sessions in `oldest` become
  // the ones that were silent for longest.
  void FillSessions(const std::vector<std::string>& oldest) {
    OnFront([&oldest](Front& front) {
      const Session some = *front.sessions.Find(oldest.front());
      for (size_t i = front.sessions.size(); i < kMaxSessions; ++i) {
        Session session = some;
        session.id = absl::StrCat("other", i);
        session.last_beat = absl::Now() - kSilence;
        front.sessions.Add(session.id, session);
      }
      for (size_t i = 0; i < oldest.size(); ++i) {
        front.sessions.Find(oldest[i])->last_beat =
            absl::Now() - 2 * kSilence + absl::Seconds(i);
      }
    });
  }
  bool Has(const std::string& session) {
    return Ask("GET", "sessions/" + session).status == 200;
  }
};

TEST_F(TinkerEndsTest, ATokenEndsNoSessionThatItCouldNotHaveMade) {
  const std::string reader = AddKey("r", {Scope::kRead});
  const std::string sampler = AddKey("s", {Scope::kSample});
  const std::string trainer = key_ = AddKey("t", {Scope::kTrain});
  const std::string both = AddKey("b", {Scope::kTrain, Scope::kSample});
  const std::string training = StartSession();
  const std::string path = SaveSampler(training);
  const std::string sampling = NewSession();
  key_ = sampler;
  ASSERT_EQ(SampleFrom(sampling, path).status, 200);
  FillSessions({training, sampling});

  key_ = reader;
  EXPECT_THAT(Ask("POST", absl::StrCat("sessions/", training, "/finish")).body,
              HasSubstr("lacks the scope train"));
  EXPECT_THAT(Ask("POST", absl::StrCat("sessions/", sampling, "/finish")).body,
              HasSubstr("lacks the scope sample"));
  // A new session ends the oldest of the sessions that this token may end.
  EXPECT_EQ(Ask("POST", "create_session").status, 200);
  EXPECT_TRUE(Has(training));
  EXPECT_TRUE(Has(sampling));
  key_ = sampler;
  EXPECT_EQ(Ask("POST", "create_session").status, 200);
  EXPECT_TRUE(Has(training));
  EXPECT_FALSE(Has(sampling));
  key_ = both;
  EXPECT_EQ(Ask("POST", "create_session").status, 200);
  EXPECT_FALSE(Has(training));
}

TEST_F(TinkerEndsTest, WithoutASessionThatItMayEndATokenGetsNoOther) {
  const std::string reader = AddKey("r", {Scope::kRead});
  key_ = AddKey("t", {Scope::kTrain});
  const std::string session = StartSession();
  Result(CreateModel(session));
  FillSessions({session});
  OnFront([&session](Front& front) {
    for (auto& [id, other] : front.sessions) {
      if (id != session) other.last_beat = absl::Now();
    }
  });
  key_ = reader;
  EXPECT_EQ(Ask("POST", "create_session").status, 429);
  EXPECT_TRUE(Has(session));
}

TEST_F(TinkerFrontTest, ASessionThatEndsCancelsItsSamplesAndNoOthers) {
  Start();
  const auto sample = [this](const std::string& session) {
    return Sample(
        {{"sampling_session_id", NewSampler(session)}, {"seq_id", 1}});
  };
  const std::string ending = NewSession();
  engine_->Hold();
  const Json cancelled = sample(ending), other = sample(NewSession());
  EXPECT_EQ(engine_->seen().num_waiting, 2u);
  Finish(ending);
  engine_->Release();
  EXPECT_TRUE(Result(cancelled).contains("error"));
  EXPECT_EQ(Result(other)["sequences"].size(), 1u);
  EXPECT_EQ(engine_->seen().num_cancelled, 1u);
  OnFront([](Front& front) { EXPECT_EQ(front.running.size(), 0u); });
}

TEST_F(TinkerFrontTest, ASamplersTokenSamplesFromACheckpointAndChangesNone) {
  const std::string trainer = AddKey("t", {Scope::kTrain});
  const std::string sampler = AddKey("s", {Scope::kSample});
  key_ = trainer;
  const std::string path = SaveSampler(StartSession());
  key_ = sampler;
  const std::string session = NewSession();
  const HttpReply made = SampleFrom(session, path);
  ASSERT_EQ(made.status, 200) << made.body;
  const Json drawn = Result(Sample(
      {{"sampling_session_id", Json::parse(made.body)["sampling_session_id"]},
       {"seq_id", 1}}));
  EXPECT_EQ(drawn["sequences"].size(), 1u) << drawn;
  EXPECT_EQ(engine_->num_adapters(), 1u);
  const std::string run = absl::StrReplaceAll(
      path,
      {{"tinker://", "training_runs/"}, {"/sampler", "/checkpoints/sampler"}});
  EXPECT_EQ(Ask("DELETE", run).status, 403);
}

TEST_F(TinkerFrontTest, AModelWhoseAdapterAClientDeletesFailsByNameAndEnds) {
  const std::string session = StartSession();
  const std::string model = Result(CreateModel(session))["model_id"];
  std::promise<void> deleted;
  engine_->DeleteAdapter(absl::StrReplaceAll(model, {{":", "."}}),
                         [&](const auto&) { deleted.set_value(); });
  deleted.get_future().wait();
  for (int seq = 1; seq < 4; ++seq) {
    const Json result = Result(Train(model, seq));
    EXPECT_EQ(result["category"], "user") << result;
  }
  EXPECT_EQ(Ask("POST", "get_info", {{"model_id", model}}).status, 404);
  Finish(session);
  AwaitDeletions();
  OnFront([](Front& front) { EXPECT_EQ(front.models.size(), 0u); });
}

TEST_F(TinkerFrontTest, AnotherTenantsAdapterOfTheSameNameHasNoMetadata) {
  const std::string other = AddKey("b", {Scope::kTrain}, "birch");
  key_ = AddKey("a", {Scope::kTrain});
  const std::string model = Result(CreateModel(StartSession()))["model_id"];
  std::promise<absl::Status> made;
  CreateAdapterRequest request;
  request.adapter_id =
      absl::StrCat("birch~", absl::StrReplaceAll(model, {{":", "."}}));
  request.tenant = "birch";
  engine_->CreateAdapter(request, [&](const absl::StatusOr<AdapterInfo>& info) {
    made.set_value(info.status());
  });
  ASSERT_THAT(made.get_future().get(), IsOk());
  for (const bool own : {true, false}) {
    if (!own) key_ = other;
    const HttpReply reply = Ask("GET", "training_runs/" + model);
    ASSERT_EQ(reply.status, 200) << reply.body;
    EXPECT_EQ(Json::parse(reply.body).contains("user_metadata"), own);
  }
}

TEST_F(TinkerFrontTest, WithoutAStateFolderACheckpointKeepsWhatItsClientSaid) {
  keeps_ = false;
  ServerOptions options;
  options.model_aliases = {"alias"};
  Start(std::move(options));
  const std::string model =
      Result(Post("create_model",
                  {{"session_id", NewSession()},
                   {"model_seq_id", 0},
                   {"base_model", "hub/alias"},
                   {"lora_config", {{"rank", 4}}},
                   {"optimizer_config", {{"type", "dimuon"}}}}))["model_id"];
  const std::string path =
      Result(Post("save_weights", {{"model_id", model},
                                   {"seq_id", 1},
                                   {"path", "kept"},
                                   {"ttl_seconds", 7200},
                                   {"user_metadata", {{"k", "v"}}}}))["path"];
  const std::string run = absl::StrCat("training_runs/", model, "/checkpoints");
  const auto shown = [&] {
    return Json::parse(Ask("GET", run).body)["checkpoints"][0];
  };
  const std::string expires = TimeText(kCannedCreation + absl::Hours(2));
  Restart();
  EXPECT_EQ(shown()["expires_at"], expires);
  EXPECT_EQ(shown()["user_metadata"], (Json{{"k", "v"}}));
  const Json info = Post("weights_info", {{"tinker_path", path}});
  EXPECT_EQ(info["base_model"], "hub/alias");
  EXPECT_EQ(info["optimizer_config"]["type"], "dimuon");
  const std::string ttl = absl::StrCat(run, "/weights/kept/ttl");
  EXPECT_EQ(Ask("PUT", ttl, {{"ttl_seconds", 3599}}).status, 400);
  EXPECT_EQ(Ask("PUT", ttl, {{"ttl_seconds", 3600}}).status, 200);
  Restart();
  const std::string changed = shown()["expires_at"];
  EXPECT_GE(changed, TimeText(absl::Now() + absl::Minutes(59)));
  EXPECT_EQ(Ask("PUT", ttl, {{"ttl_seconds", nullptr}}).status, 200);
  Restart();
  EXPECT_FALSE(shown().contains("expires_at"));
  EXPECT_EQ(Ask("PUT", absl::StrCat(run, "/weights/none/ttl"),
                {{"ttl_seconds", 3600}})
                .status,
            404);
}

TEST_F(TinkerFrontTest, ADeletionThatADrainRefusesHappensAfterTheRestart) {
  const std::string session = StartSession();
  Result(CreateModel(session));
  OnFront([](Front& front) { front.port.core()->engine.SetDraining(true); });
  Finish(session);
  OnFront([](Front& front) {
    front.adapters.SweepDeletions();
    EXPECT_EQ(front.adapters.num_deletions(), 1u);
  });
  EXPECT_EQ(engine_->num_adapters(), 1u);
  Restart();
  AwaitDeletions();
  EXPECT_EQ(engine_->num_adapters(), 0u);
  EXPECT_TRUE(engine_->NotesWith("tinker/orphan/").empty());
}

TEST_F(TinkerFrontTest, AModelWithoutItsSessionGoesAfterTheRestart) {
  const std::string session = StartSession();
  Result(CreateModel(session));
  StopFront();
  // A crash while the session ended has left the model.
  engine_->EraseNote(absl::StrCat("tinker/session/", session));
  StartFront();
  EXPECT_TRUE(Eventually([this] { return engine_->num_adapters() == 0; }));
  EXPECT_TRUE(engine_->NotesWith("tinker/model/").empty());
}

TEST_F(TinkerFrontTest, AModelThatWasBeingMadeIsMadeAfterTheRestart) {
  const std::string session = StartSession();
  engine_->Hold();
  const Json making = CreateModel(session);
  const std::string model = making["model_id"];
  RestartAll();
  EXPECT_EQ(Result(making)["model_id"], model);
  EXPECT_TRUE(Result(Train(model, 1)).contains("metrics"));
  EXPECT_TRUE(Result(Train(model, 2)).contains("metrics"));
}

TEST_F(TinkerFrontTest, EqualRequestsForAModelShareTheOutcomeOfItsWrite) {
  const std::string session = StartSession();
  // The front takes both requests before the ledger has written the model.
  const auto ask_twice = [&] {
    std::vector<std::future<HttpReply>> replies;
    OnFront([&](Front&) {
      for (int i = 0; i < 2; ++i) replies.push_back(CreateModelLater(session));
    });
    return std::make_pair(replies[0].get(), replies[1].get());
  };
  {
    // The notes of the model and of the request that makes it.
    for (int i = 0; i < 2; ++i) {
      engine_->FailNext(WithReason(absl::ResourceExhaustedError("no room"),
                                   {.name = "STATE_DISK_FULL", .values = {}}),
                        "PutNote");
    }
    const auto [first, second] = ask_twice();
    EXPECT_EQ(first.status, 429) << first.body;
    EXPECT_EQ(second.status, 429) << second.body;
    OnFront([](Front& front) { EXPECT_EQ(front.models.size(), 0u); });
  }
  EXPECT_EQ(Calls("CreateAdapter"), 0);
  const auto [first, second] = ask_twice();
  ASSERT_EQ(first.status, 200) << first.body;
  EXPECT_EQ(first.body, second.body);
  const Json made = Result(Json::parse(first.body));
  ASSERT_TRUE(made.contains("model_id")) << made;
  EXPECT_TRUE(Result(Train(made["model_id"], 1)).contains("metrics"));
  EXPECT_EQ(Calls("CreateAdapter"), 1);
}

TEST_F(TinkerFrontTest, AResultFromBeforeTheRestartIsTheEngines) {
  const std::string session = StartSession();
  const Json made = CreateModel(session);
  const std::string model = Result(made)["model_id"];
  const auto save = [&](const char* how, int seq, Json fields) {
    fields.update({{"model_id", model}, {"seq_id", seq}});
    return Post(how, fields);
  };
  const std::vector<Json> steps = {
      Train(model, 1),
      Post("optim_step", {{"model_id", model}, {"seq_id", 2}}),
      save("save_weights", 3, {{"path", "a"}}),
      save("save_weights_for_sampler", 4, {{"path", "b"}}),
      save("save_weights_external", 5, {{"path", "c"}}),
      save("save_weights_for_sampler", 6, {{"sampling_session_seq_id", 7}}),
      save("load_weights", 7, {{"path", "tinker://nobody/weights/x"}})};
  std::vector<Json> before;
  for (const Json& step : steps) before.push_back(Result(step));
  EXPECT_EQ(before.back()["category"], "user") << before.back();
  EXPECT_TRUE(engine_->NotesWith("tinker/making/").empty());
  Restart();
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(Result(steps[i]), before[i]) << i;
  }
  EXPECT_EQ(Result(made)["model_id"], model);
  const HttpReply unknown = Ask("POST", "retrieve_future",
                                {{"request_id", absl::StrCat(model, ":8")}});
  EXPECT_EQ(unknown.status, 410) << unknown.body;
}

TEST_F(TinkerFrontTest, EntriesOfTheLedgerComeBackUntilTheyAreErased) {
  Start();
  const std::string bytes("\0\xff\n", 3);
  std::promise<void> kept;
  OnFront([&](Front& front) {
    const auto none = [](const absl::Status&) {};
    front.ledger.Put(EntryKind::kMaking, {"a:12", {{"n", 2}}, ""}, none);
    front.ledger.Put(EntryKind::kMaking, {"a:12", {{"n", 3}}, bytes}, none);
    front.ledger.Put(EntryKind::kOrphan, {"../a", {}, ""}, none);
    front.ledger.Put(EntryKind::kMaking, {"b:1", {}, ""},
                     [&kept](const absl::Status& put) {
                       EXPECT_THAT(put, IsOk());
                       kept.set_value();
                     });
  });
  kept.get_future().wait();
  OnFront([&](Front& front) {
    front.ledger.Erase(EntryKind::kMaking, "b:1");
    front.ledger.Erase(EntryKind::kOrphan, "../a");
    const auto steps = front.ledger.ReadAll(EntryKind::kMaking);
    ASSERT_EQ(steps.size(), 1u);
    EXPECT_EQ(steps[0].id, "a:12");
    EXPECT_EQ(steps[0].fields["n"], 3);
    EXPECT_EQ(steps[0].bytes, bytes);
    EXPECT_TRUE(front.ledger.ReadAll(EntryKind::kOrphan).empty());
  });
}

TEST_F(TinkerFrontTest, AServerThatStopsLeavesAModelToTheNextProcess) {
  Start();
  Callback<FutureResult> done;
  std::promise<void> promised;
  OnFront([&](Front& front) {
    EXPECT_THAT(Promise(
                    front, std::make_shared<Call>(), {.model = "m", .seq = 0},
                    [&done](Callback<FutureResult> task) {
                      done = std::move(task);
                      return absl::OkStatus();
                    },
                    [&promised](const HttpReply&) { promised.set_value(); }),
                IsOk());
  });
  promised.get_future().wait();
  OnFront([&](Front&) { done(absl::UnavailableError("the server stopped")); });
  auto result = AskLater("POST", "retrieve_future", {{"request_id", "m:0"}});
  OnFront([&](Front&) { done(FutureResult::Of({{"made", true}})); });
  EXPECT_THAT(result.get().body, HasSubstr("made"));
}

class TinkerLoadTest : public TinkerFrontTest {
 protected:
  // Asks to load a model, which waits, as the engine is held.
  void LoadHeld() {
    Start();
    const std::string session = NewSession();
    const std::string path = SaveSampler(session);
    model_ = absl::StrCat(session, ":train:1");
    engine_->Hold();
    making_ = Post("load_weights", {{"session_id", session},
                                    {"model_seq_id", 1},
                                    {"path", path},
                                    {"optimizer", true}});
  }

  std::string model_;
  Json making_;
};

TEST_F(TinkerLoadTest, AStepIsTakenWhenItsModelIsMade) {
  LoadHeld();
  EXPECT_EQ(TrainLater(model_, 1).get().status, 503);
  engine_->Release();
  EXPECT_EQ(Result(making_)["model_id"], model_);
  EXPECT_TRUE(Result(Train(model_, 1)).contains("metrics"));
}

TEST_F(TinkerLoadTest, AModelThatWasLoadedBeforeTheRestartIsNotLoadedAgain) {
  LoadHeld();
  const size_t adapters = engine_->num_adapters();
  StopFront();
  engine_->Release();
  ASSERT_TRUE(Eventually([&] { return engine_->num_adapters() > adapters; }));
  StartFront();
  EXPECT_EQ(Result(making_)["model_id"], model_);
  EXPECT_TRUE(Result(Train(model_, 1)).contains("metrics"));
}

TEST_F(TinkerLoadTest, StepsFailIfTheRestartHasLostTheCheckpoint) {
  LoadHeld();
  RestartAll();
  EXPECT_EQ(Result(making_)["category"], "user");
  EXPECT_EQ(Result(Train(model_, 1))["category"], "user");
}

TEST_F(TinkerFrontTest, StepsOfAModelThatCannotBeMadeFail) {
  const std::string session = StartSession();
  engine_->FailNext(absl::InvalidArgumentError("no"), "CreateAdapter");
  EXPECT_EQ(Result(CreateModel(session))["category"], "user");
  const Json result = Result(Train(absl::StrCat(session, ":train:0"), 1));
  EXPECT_EQ(result["category"], "user") << result;
}

TEST_F(TinkerFrontTest, AStepThatADrainTookBackRunsWhenWorkIsTakenAgain) {
  const std::string model = Result(CreateModel(StartSession()))["model_id"];
  const Json second = Train(model, 2);
  std::promise<bool> drained;
  engine_->Drain([&](const auto& done) { drained.set_value(done.ok()); });
  EXPECT_TRUE(drained.get_future().get());
  engine_->Undrain();
  EXPECT_TRUE(Result(Train(model, 1)).contains("metrics"));
  EXPECT_TRUE(Result(second).contains("metrics"));
}

TEST_F(TinkerFrontTest, AnEngineThatFailedEndsStepsThatNobodyKeeps) {
  keeps_ = false;
  const std::string model = Result(CreateModel(StartSession()))["model_id"];
  const absl::Status gone = absl::UnavailableError("a rank is gone");
  engine_->FailForGood(gone);
  engine_->FailNextRun(gone, "ForwardBackward");
  EXPECT_EQ(Result(Train(model, 1))["error"], "a rank is gone");
}

TEST_F(TinkerFrontTest, WorkBeyondATenantsQuotaWaitsAndIsDone) {
  key_ = AddKey("t", {Scope::kTrain, Scope::kSample});
  ServerOptions options;
  options.max_calls_per_tenant = 1;
  options.max_tokens_per_second_per_tenant = 20;
  Start(std::move(options));
  const std::string model = Result(CreateModel(NewSession()))["model_id"];
  std::vector<Json> steps;
  for (int seq = 1; seq <= 20; ++seq) steps.push_back(Train(model, seq));
  for (const Json& step : steps) {
    const Json result = Result(step);
    EXPECT_TRUE(result.contains("metrics")) << result;
  }
}

TEST_F(TinkerFrontTest, UrlsHaveTheSchemeThatTheProxyNames) {
  Start();
  const std::string route = SaveExternal();
  for (const auto& [proto, url] :
       std::vector<std::pair<std::string, std::string>>{
           {"", "http://front:80/api/v1/files/"},
           {"http", "http://front:80/api/v1/files/"},
           {"https", "https://front:80/api/v1/files/"},
           {"HTTPS", "http://front:80/api/v1/files/"},
           {"https,http", "http://front:80/api/v1/files/"},
           {"javascript", "http://front:80/api/v1/files/"}}) {
    forwarded_proto_ = proto;
    const HttpReply reply = Ask("GET", route);
    ASSERT_EQ(reply.status, 200) << reply.body;
    const Json urls = Json::parse(reply.body)["urls"];
    EXPECT_EQ(urls.size(), 2u);
    for (const auto& [name, text] : urls.items()) {
      EXPECT_THAT(text.get<std::string>(), StartsWith(url)) << proto;
    }
  }
}

}  // namespace
}  // namespace weft::server::tinker
