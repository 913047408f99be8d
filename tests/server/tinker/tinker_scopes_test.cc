// Tests which token may use which route of the Tinker front.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "server/tinker/routes.h"
#include "src/base/observe/log.h"
#include "tests/server/tinker/tinker_front_fixture.h"

namespace weft::server::tinker {
namespace {

using ::testing::HasSubstr;

// What a caller must have for a route.
enum class Need { kNothing, kRead, kSample, kTrain };
constexpr Need kNothing = Need::kNothing;
constexpr Need kRead = Need::kRead;
constexpr Need kSample = Need::kSample;
constexpr Need kTrain = Need::kTrain;

// A request whose body is an empty JSON object, and the status for a caller who
// meets `need`.
struct Row {
  const char* method;
  const char* path;
  Need need;
  int status;
};

constexpr Row kRows[] = {
    {"GET", "healthz", kNothing, 200},
    {"POST", "auth/token", kRead, 200},
    {"GET", "auth/apikey/me", kRead, 200},
    {"DELETE", "auth/apikey/me", kRead, 400},
    {"GET", "get_server_capabilities", kRead, 200},
    {"POST", "client/config", kRead, 200},
    {"POST", "client/dynamic_config", kRead, 200},
    {"POST", "telemetry", kRead, 200},
    {"POST", "create_session", kRead, 200},
    {"POST", "session_heartbeat", kRead, 400},
    {"POST", "sessions/none/finish", kRead, 200},
    {"GET", "sessions", kRead, 200},
    {"GET", "sessions/none", kRead, 404},
    {"POST", "sessions/search", kRead, 200},
    {"PUT", "sessions/none/project", kRead, 400},
    {"GET", "sessions/none/trace_export", kRead, 400},
    {"GET", "audit", kRead, 200},
    {"GET", "billing/usage/events", kRead, 400},
    {"GET", "billing/usage/checkpoints/current", kRead, 200},
    {"POST", "create_custom_loss", kTrain, 400},
    {"POST", "create_model", kTrain, 400},
    {"POST", "get_info", kRead, 400},
    {"POST", "unload_model", kTrain, 400},
    {"POST", "forward_backward", kTrain, 400},
    {"POST", "forward", kTrain, 400},
    {"POST", "optim_step", kTrain, 400},
    {"POST", "save_weights", kTrain, 400},
    {"POST", "save_weights_for_sampler", kTrain, 400},
    {"POST", "save_weights_external", kTrain, 400},
    {"POST", "load_weights", kTrain, 400},
    {"POST", "create_sampling_session", kSample, 400},
    {"GET", "samplers/none", kRead, 404},
    {"POST", "asample", kSample, 400},
    {"POST", "retrieve_future", kRead, 400},
    {"POST", "cancel_future", kSample, 400},
    {"GET", "training_runs", kRead, 200},
    {"GET", "training_runs/none", kRead, 404},
    {"GET", "training_runs/none/checkpoints", kRead, 200},
    {"DELETE", "training_runs/none/checkpoints/weights/a", kTrain, 404},
    {"PUT", "training_runs/none/checkpoints/weights/a/ttl", kTrain, 404},
    {"POST", "training_runs/none/checkpoints/weights/a/publish", kRead, 400},
    {"DELETE", "training_runs/none/checkpoints/weights/a/publish", kRead, 400},
    {"GET",
     "training_runs/none/checkpoints/external_weights/a/external_weights_urls",
     kTrain, 404},
    {"GET", "training_runs/none/checkpoints/weights/a/archive", kTrain, 404},
    {"GET", "files/1/none/a/adapter_config.json/00", kNothing, 404},
    {"GET", "checkpoints", kRead, 200},
    {"POST", "weights_info", kRead, 400},
    {"POST", "copy_weights", kTrain, 400}};

bool Fits(const Route& route, const Row& row) {
  const std::vector<std::string> pattern = absl::StrSplit(route.path, '/');
  const std::vector<std::string> parts = absl::StrSplit(row.path, '/');
  bool fits =
      row.method == std::string(route.method) && pattern.size() == parts.size();
  for (size_t i = 0; fits && i < parts.size(); ++i) {
    fits = pattern[i] == "*" || pattern[i] == parts[i];
  }
  return fits;
}

using TinkerScopesTest = TinkerFrontTest;

TEST_F(TinkerScopesTest, EachRouteHasARowHere) {
  EXPECT_EQ(Routes().size(), std::size(kRows));
  for (const Route& route : Routes()) {
    int rows = 0;
    for (const Row& row : kRows) rows += Fits(route, row) ? 1 : 0;
    EXPECT_EQ(rows, 1) << route.method << " " << route.path;
  }
}

TEST_F(TinkerScopesTest, EachScopeOpensItsOwnRoutes) {
  // The needs that a key meets.
  const std::vector<std::pair<std::string, std::vector<Need>>> keys = {
      {"", {kNothing}},
      {"tml-weft_unknown", {kNothing}},
      {AddKey("r", {Scope::kRead}), {kNothing, kRead}},
      {AddKey("s", {Scope::kSample}), {kNothing, kRead, kSample}},
      {AddKey("t", {Scope::kTrain}), {kNothing, kRead, kTrain}},
      {AddKey("a", {Scope::kAdmin}), {kNothing, kRead, kSample, kTrain}}};
  Start();
  for (const auto& [key, meets] : keys) {
    key_ = key;
    for (const Row& row : kRows) {
      const bool may = std::ranges::count(meets, row.need) > 0;
      const int refusal = meets.size() == 1 ? 401 : 403;
      const HttpReply reply = Ask(row.method, row.path);
      EXPECT_EQ(reply.status, may ? row.status : refusal)
          << row.method << " " << row.path << " of " << meets.size() << ": "
          << reply.body;
    }
  }
}

// Clients send what other servers want, and health checks send no key.
TEST_F(TinkerScopesTest, AServerWithoutTokensTakesAnyKey) {
  Start();
  for (const char* key : {"", "sk-x", "EMPTY_TOKEN", "weft_x", "eyJ"}) {
    key_ = key;
    for (const char* path : {"healthz", "sessions", "auth/apikey/me"}) {
      EXPECT_EQ(Ask("GET", path).status, 200) << key;
    }
  }
}

TEST_F(TinkerScopesTest, AResultNeedsTheScopeOfItsRequest) {
  const std::string reader = AddKey("r", {Scope::kRead});
  const std::string sampler = AddKey("s", {Scope::kSample});
  const std::string trainer = AddKey("t", {Scope::kTrain});
  Start();
  key_ = sampler;
  const std::string made = NewSampler(NewSession());
  const Json numbered = {{"sampling_session_id", made}, {"seq_id", 1}};
  const Json sampled = Sample(numbered);
  // A repeated request gets the same future, whose id cannot be guessed.
  EXPECT_EQ(Sample(numbered), sampled);
  EXPECT_GT(sampled["request_id"].get<std::string>().size(), made.size() + 32);
  key_ = trainer;
  const Json trained = CreateModel(NewSession());
  const auto status = [&](const std::string& key, const Json& promise) {
    key_ = key;
    return Ask("POST", "retrieve_future",
               {{"request_id", promise["request_id"]}})
        .status;
  };
  EXPECT_EQ(status(reader, sampled), 403);
  EXPECT_EQ(status(trainer, sampled), 403);
  EXPECT_EQ(status(sampler, sampled), 200);
  EXPECT_EQ(status(reader, trained), 403);
  EXPECT_EQ(status(sampler, trained), 403);
  EXPECT_EQ(status(trainer, trained), 200);
}

TEST_F(TinkerScopesTest, ARefusalIsCountedAndLogged) {
  key_ = AddKey("r", {Scope::kRead});
  Start();
  ::testing::internal::CaptureStderr();
  SetLogLevel(LogLevel::kWarning);
  EXPECT_EQ(Ask("POST", "optim_step?secret=1").status, 403);
  SetLogLevel(LogLevel::kError);
  const std::string log = ::testing::internal::GetCapturedStderr();
  for (const char* part : {"audit", "POST /api/v1/optim_step", "127.0.0.1:9",
                           "PERMISSION_DENIED", "acme"}) {
    EXPECT_THAT(log, HasSubstr(part));
  }
  EXPECT_THAT(log, ::testing::Not(HasSubstr("secret")));
  key_ = "no prefix";
  EXPECT_EQ(Ask("GET", "sessions").status, 401);
  std::map<std::string, double> counts;
  for (const auto& family : registry_->Collect()) {
    if (family.name != "weft_auth_failures_total") continue;
    for (const auto& metric : family.metric) {
      counts[metric.label.at(0).value] = metric.counter.value;
    }
  }
  EXPECT_EQ(counts["scope"], 1);
  EXPECT_EQ(counts["no_token"], 1);
}

}  // namespace
}  // namespace weft::server::tinker
