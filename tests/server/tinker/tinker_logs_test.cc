// Tests what the Tinker front does with requests for sessions of other logs.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/credentials.h"
#include "server/tinker/logs.h"
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
  EXPECT_THAT(reply.body, HasSubstr("log 1, which the server at one:1 has"));
  // Nobody has log 2.
  const std::string lost = "log002" + std::string(26, 'a');
  door_ = "1";
  EXPECT_EQ(Ask("POST", "session_heartbeat", {{"session_id", lost}}).status,
            503);
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
