// Tests what the Tinker front does with requests for sessions of other logs.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/credentials.h"
#include "server/tinker/logs.h"
#include "server/tinker/sessions.h"
#include "src/base/clock.h"
#include "src/request/move_unit.h"
#include "tests/server/tinker/tinker_front_fixture.h"

namespace weft::server::tinker {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::StartsWith;

const std::string kOther = "log001" + std::string(26, 'a');  // A session.

class TinkerLogsTest : public TinkerFrontTest {
 protected:
  // Starts the owner of log `own` of three.
  void StartLog(int own) {
    engine_ = std::make_unique<CannedEngine>();
    engine_->mutable_info()->log = own;
    engine_->mutable_info()->num_logs = 3;
    engine_->SetOwners({{0, "zero:1"}, {1, "one:1"}}, {});
    Start();
  }

  static std::string OwnerIn(const HttpReply& reply) {
    for (const auto& [name, value] : reply.headers) {
      if (name == kOwnerHeader) return value;
    }
    return "";
  }

  // Returns where the edge is to send a request; empty if it is served.
  std::string Elsewhere(const std::string& method, const std::string& path,
                        const Json& body = Json::object()) {
    door_ = "1";
    const HttpReply reply = Ask(method, path, body);
    door_ = "";
    EXPECT_EQ(reply.status == 421, !OwnerIn(reply).empty()) << reply.body;
    return OwnerIn(reply);
  }
};

TEST_F(TinkerLogsTest, IdsNameTheirLog) {
  StartLog(2);
  const std::string session = NewSession();
  EXPECT_THAT(session, MatchesRegex("log002[0-9a-f]{26}"));
  EXPECT_EQ(session.size(), 32u);
  EXPECT_EQ(LogOf(session), 2);
  const Json made = CreateModel(session);
  EXPECT_EQ(made["model_id"], session + ":train:0");
  Result(made);
  EXPECT_EQ(ModelOfAdapter(AdapterOfModel(session + ":train:0")),
            session + ":train:0");
  const Json sample = Sample({{"base_model", "toy"}});
  EXPECT_EQ(LogOf(sample["request_id"].get<std::string>()), 2);
  EXPECT_EQ(LogOf("log01"), std::nullopt);
  EXPECT_EQ(LogOf("log0a1"), std::nullopt);
  EXPECT_EQ(LogOf("0123456789abcdef"), std::nullopt);
}

TEST_F(TinkerLogsTest, OneLogHasTheIdsOfBefore) {
  Start();
  EXPECT_THAT(NewSession(), MatchesRegex("[0-9a-f]{32}"));
  const Json sample = Sample({{"base_model", "toy"}});
  EXPECT_THAT(sample["request_id"].get<std::string>(), StartsWith("base:"));
  // No id is another log's.
  EXPECT_EQ(Elsewhere("POST", "get_info", {{"model_id", kOther + ":train:0"}}),
            "");
}

TEST_F(TinkerLogsTest, ARequestForAnotherLogGoesToItsOwner) {
  StartLog(0);
  const std::string model = kOther + ":train:0";
  for (const char* const path :
       {"create_model", "create_sampling_session", "create_custom_loss",
        "session_heartbeat", "load_weights"}) {
    EXPECT_EQ(Elsewhere("POST", path, {{"session_id", kOther}}), "one:1")
        << path;
  }
  for (const char* const path :
       {"get_info", "unload_model", "optim_step", "save_weights",
        "save_weights_for_sampler", "save_weights_external", "load_weights"}) {
    EXPECT_EQ(Elsewhere("POST", path, {{"model_id", model}, {"seq_id", 1}}),
              "one:1")
        << path;
  }
  for (const char* const path : {"forward_backward", "forward"}) {
    const char* const input = std::string(path) == "forward"
                                  ? "forward_input"
                                  : "forward_backward_input";
    const Json data = {{"data", Json::array()}, {"loss_fn", "cross_entropy"}};
    EXPECT_EQ(Elsewhere("POST", path,
                        {{"model_id", model}, {"seq_id", 1}, {input, data}}),
              "one:1")
        << path;
  }
  EXPECT_EQ(Elsewhere("POST", "asample",
                      {{"sampling_session_id", kOther + ":sample:1"}}),
            "one:1");
  for (const char* const path : {"retrieve_future", "cancel_future"}) {
    EXPECT_EQ(Elsewhere("POST", path, {{"request_id", model + ":3"}}), "one:1");
  }
  EXPECT_EQ(Elsewhere("GET", "sessions/" + kOther), "one:1");
  EXPECT_EQ(Elsewhere("POST", "sessions/" + kOther + "/finish"), "one:1");
  EXPECT_EQ(Elsewhere("GET", "samplers/" + kOther + ":sample:1"), "one:1");
  EXPECT_EQ(Elsewhere("GET", "training_runs/" + model), "one:1");
}

TEST_F(TinkerLogsTest, OtherRequestsAreServedWhereTheyCome) {
  StartLog(1);
  const std::string session = NewSession();
  Result(CreateModel(session));
  EXPECT_EQ(Elsewhere("POST", "session_heartbeat", {{"session_id", session}}),
            "");
  EXPECT_EQ(Elsewhere("POST", "get_info", {{"model_id", session + ":train:0"}}),
            "");
  EXPECT_EQ(Elsewhere("GET", "get_server_capabilities"), "");
  EXPECT_EQ(Elsewhere("POST", "create_session"), "");
  EXPECT_EQ(Elsewhere("GET", "sessions"), "");
  EXPECT_EQ(Elsewhere("POST", "asample",
                      {{"base_model", "toy"},
                       {"prompt", Prompt({1, 2})},
                       {"sampling_params", {{"max_tokens", 2}}}}),
            "");
  // A session of the time when the state had one log.
  const std::string old(32, '0');
  EXPECT_EQ(Elsewhere("POST", "session_heartbeat", {{"session_id", old}}),
            "zero:1");
  // The copy of a checkpoint is a run of no log.
  EXPECT_EQ(Elsewhere("GET", "training_runs/" + old), "");
  // There are three logs.
  const std::string none = "log003" + std::string(26, 'a');
  EXPECT_EQ(Elsewhere("POST", "session_heartbeat", {{"session_id", none}}), "");
}

TEST_F(TinkerLogsTest, AClientWithoutAnEdgeIsToldToTryAgain) {
  StartLog(0);
  const HttpReply reply =
      Ask("POST", "session_heartbeat", {{"session_id", kOther}});
  EXPECT_EQ(reply.status, 503);
  EXPECT_GT(reply.retry_after_seconds, 0);
  EXPECT_EQ(OwnerIn(reply), "");
  EXPECT_THAT(reply.body, HasSubstr("the server at one:1 has"));
  // Nobody has log 2.
  const std::string lost = "log002" + std::string(26, 'a');
  door_ = "1";
  EXPECT_EQ(Ask("POST", "session_heartbeat", {{"session_id", lost}}).status,
            503);
}

TEST_F(TinkerLogsTest, AMovedSessionIsWhereItsEntrySays) {
  StartLog(0);
  const std::string own = "log000" + std::string(26, 'b');
  engine_->SetOwners({{1, "one:1"}}, {{kOther, "two:1"}, {own, "one:1"}});
  EXPECT_EQ(Elsewhere("POST", "session_heartbeat", {{"session_id", kOther}}),
            "two:1");
  EXPECT_EQ(Elsewhere("POST", "get_info", {{"model_id", own + ":train:0"}}),
            "one:1");
  // The second hop ends there, if two processes take each other for the owner.
  const HttpReply reply =
      Ask("POST", "session_heartbeat", {{"session_id", kOther}});
  EXPECT_EQ(reply.status, 503);
  // No log has it.
  const std::string gone = "log000" + std::string(26, 'c');
  EXPECT_EQ(Ask("POST", "session_heartbeat", {{"session_id", gone}}).status,
            410);
}

TEST_F(TinkerLogsTest, AHeldSessionWaits) {
  StartLog(0);
  const std::string session = NewSession();
  const Json made = CreateModel(session);
  Result(made);
  engine_->SetHeld(session);
  const Json update = {{"model_id", session + ":train:0"},
                       {"seq_id", 1},
                       {"adam_params", Json::object()}};
  EXPECT_EQ(Ask("POST", "optim_step", update).status, 503);
  EXPECT_EQ(Ask("POST", "sessions/" + session + "/finish").status, 503);
  const Json beat = {{"session_id", session}};
  EXPECT_EQ(Ask("POST", "session_heartbeat", beat).status, 200);
  EXPECT_EQ(Ask("POST", "retrieve_future", made).status, 200);
  EXPECT_EQ(
      Ask("POST", "retrieve_future", {{"request_id", session + ":train:0:1"}})
          .status,
      503);
  // Its end belongs to whoever has it then.
  OnFront([](Front& front) {
    SweepSessions(front, SteadyNow() + 2 * kSessionTimeout);
    EXPECT_EQ(front.sessions.size(), 1u);
  });
  engine_->SetHeld("");
  EXPECT_EQ(Ask("POST", "optim_step", update).status, 200);
}

// The notes of a session go with its adapters.
class MovedSessionTest : public TinkerLogsTest {
 protected:
  void Leave() {
    for (const auto& [name, value] : engine_->NotesWith("tinker/")) {
      if (UnitOfNote(name).empty()) continue;
      notes_[name] = value;
      engine_->EraseNote(name);
    }
  }
  void Come() {
    for (const auto& [name, value] : notes_) {
      engine_->PutNote(name, *value, [](const absl::Status&) {});
    }
  }

  Notes notes_;
};

TEST_F(MovedSessionTest, ItIsForgottenAndKnownAgain) {
  StartLog(0);
  const std::string session = NewSession();
  const std::string model = session + ":train:0";
  const std::string sampler = NewSampler(session);
  Result(CreateModel(session));
  const Json promise = Train(model, 1);
  const Json trained = Result(promise);
  // A long poll for a step that waits for others.
  const Json late = Post(
      "optim_step",
      {{"model_id", model}, {"seq_id", 3}, {"adam_params", Json::object()}});
  std::future<HttpReply> poll = AskLater("POST", "retrieve_future", late);
  ASSERT_TRUE(EventuallyInFront([&](Front& front) {
    return front.futures.LastAsked(late["request_id"].get<std::string>()) ==
           absl::InfiniteFuture();
  }));
  Leave();
  engine_->SetOwners({{1, "one:1"}}, {{session, "one:1"}});
  EXPECT_EQ(Elsewhere("POST", "session_heartbeat", {{"session_id", session}}),
            "one:1");
  EXPECT_EQ(poll.get().status, 410);
  OnFront([](Front& front) {
    EXPECT_EQ(
        front.sessions.size() + front.models.size() + front.samplers.size(),
        0u);
    EXPECT_EQ(front.adapters.num_deletions(), 0u);
  });
  EXPECT_EQ(Calls("DeleteAdapter"), 0);

  Come();
  engine_->SetOwners({{1, "one:1"}}, {});
  const Json beat = {{"session_id", session}};
  EXPECT_TRUE(Eventually(
      [&] { return Ask("POST", "session_heartbeat", beat).status == 200; }));
  EXPECT_TRUE(EventuallyInFront([&](Front& front) {
    const Model* const found = front.models.Find(model);
    return found != nullptr && found->made && front.arriving.empty() &&
           front.samplers.Has(sampler);
  }));
  // The engine has the result of a step that is done.
  EXPECT_EQ(Result(promise), trained);
  Result(Post(
      "optim_step",
      {{"model_id", model}, {"seq_id", 2}, {"adam_params", Json::object()}}));
  Result(late);
  EXPECT_EQ(Post("get_info", {{"model_id", model}})["model_id"], model);
}

TEST_F(MovedSessionTest, AModelThatWasBeingMadeIsMadeThere) {
  StartLog(0);
  const std::string session = NewSession();
  Result(CreateModel(session));
  Leave();
  EXPECT_EQ(Ask("POST", "session_heartbeat", {{"session_id", session}}).status,
            410);
  const std::string second = session + ":train:1";
  const Json head = {
      {"id", second},
      {"fields", {{"loads", false}, {"caller", Json::object()}}}};
  const Json body = {{"session_id", session},
                     {"model_seq_id", 1},
                     {"base_model", "toy"},
                     {"lora_config", {{"rank", 4}}}};
  notes_["tinker/making/" + second] =
      std::make_shared<const std::string>(head.dump() + "\n" + body.dump());
  std::string model = *notes_.at("tinker/model/" + session + ":train:0");
  const size_t at = model.find(":train:0");
  model.replace(at, 8, ":train:1");
  notes_["tinker/model/" + second] =
      std::make_shared<const std::string>(std::move(model));
  Come();
  Ask("POST", "session_heartbeat", {{"session_id", session}});
  EXPECT_TRUE(EventuallyInFront([&](Front& front) {
    const Model* const found = front.models.Find(second);
    return found != nullptr && found->made && front.arriving.empty();
  }));
  EXPECT_TRUE(
      Eventually([&] { return engine_->NotesWith("tinker/making/").empty(); }));
}

TEST_F(MovedSessionTest,
       WhatHappenedElsewhereIsKnownThoughNobodyAskedMeanwhile) {
  StartLog(0);
  const std::string session = NewSession();
  NewSampler(session);
  Leave();
  std::erase_if(notes_, [](const auto& note) {
    return note.first.starts_with("tinker/sampler/");
  });
  Come();
  Ask("POST", "session_heartbeat", {{"session_id", session}});
  OnFront([](Front& front) {
    EXPECT_EQ(front.sessions.size(), 1u);
    EXPECT_EQ(front.samplers.size(), 0u);
  });
}

// Nobody asks for it, but it ends in its time.
TEST_F(MovedSessionTest, ASweepFindsItToo) {
  StartLog(0);
  const std::string session = NewSession();
  Leave();
  OnFront([](Front& front) {
    SweepSessions(front, SteadyNow());
    EXPECT_EQ(front.sessions.size(), 0u);
  });
  Come();
  OnFront([](Front& front) {
    SweepSessions(front, SteadyNow());
    EXPECT_EQ(front.sessions.size(), 1u);
  });
}

TEST_F(TinkerLogsTest, AllLogsSignWithOneSecret) {
  StartLog(0);
  const std::string secret = SigningSecret().value();
  // The first log's owner has given its own.
  ASSERT_TRUE(TakeSigningSecret(std::string(32, 'x')));
  Restart();
  EXPECT_EQ(SigningSecret().value(), secret);
  // Another log's was first.
  engine_->SetAgreed(std::string(32, 'y'));
  Restart();
  EXPECT_EQ(SigningSecret().value(), std::string(32, 'y'));
}

}  // namespace
}  // namespace weft::server::tinker
