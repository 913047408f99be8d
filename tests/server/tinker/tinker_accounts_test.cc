// Tests what the Tinker front says of a caller and its tenant: identity, usage,
// events, storage, sessions; and the copies of checkpoints.
#include <cstdint>
#include <future>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/accounts.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/credentials.h"
#include "tests/server/tinker/tinker_front_fixture.h"
#include "tests/support/canned_results.h"

namespace weft::server::tinker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class TinkerAccountsTest : public TinkerFrontTest {
 protected:
  Json Get(const std::string& path) {
    const HttpReply reply = Ask("GET", path);
    EXPECT_EQ(reply.status, 200) << path << ": " << reply.body;
    return Json::parse(reply.body, nullptr, false);
  }
  // Returns the message of a refusal with status 400.
  std::string Refusal(const std::string& method, const std::string& path,
                      const Json& body = Json::object()) {
    const HttpReply reply = Ask(method, path, body);
    EXPECT_EQ(reply.status, 400) << path << ": " << reply.body;
    return Json::parse(reply.body, nullptr, false).value("detail", "");
  }
  // Returns the usage of this hour and the next, which may begin meanwhile.
  Json Usage() {
    const int64_t hour = absl::ToUnixSeconds(absl::Now()) / 3600;
    const auto text = [](int64_t h) {
      return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ",
                              absl::FromUnixSeconds(h * 3600),
                              absl::UTCTimeZone());
    };
    return Get(absl::StrCat("billing/usage/events?starting_on=", text(hour - 1),
                            "&ending_before=", text(hour + 2)));
  }
  // Samples after a prompt of three tokens.
  Json Drawn(Json fields) {
    fields["prompt"] = Prompt({3, 4, 5});
    return Result(Sample(fields));
  }
};

TEST_F(TinkerAccountsTest, AJwtStandsForItsKeyUntilTheKeyIsGone) {
  const std::string reader = AddKey("r", {Scope::kRead});
  const std::string trainer = AddKey("t", {Scope::kTrain});
  Start();
  key_ = reader;
  const std::string jwt = Post("auth/token")["jwt"];
  key_ = trainer;
  const std::string session = NewSession();
  key_ = Post("auth/token")["jwt"];
  const Json model = Result(CreateModel(session));
  EXPECT_TRUE(model.contains("model_id")) << model;
  EXPECT_EQ(Get("auth/apikey/me")["name"], "t");
  EXPECT_EQ(Post("auth/token")["jwt"], key_);
  key_ = jwt;
  EXPECT_EQ(CreateModelLater(session).get().status, 403);
  EXPECT_EQ(Get("auth/apikey/me")["details"]["org_details"]["name"], "acme");
  EXPECT_THAT(Refusal("DELETE", "auth/apikey/me"),
              HasSubstr("--auth-tokens-file"));
}

TEST_F(TinkerAccountsTest, WhatAProcessHasSignedIsGoodForTheNext) {
  const std::string reader = AddKey("r", {Scope::kRead});
  Start();
  key_ = reader;
  const std::string jwt = Post("auth/token")["jwt"];
  // The next process draws another secret, and then takes that of the first.
  ASSERT_TRUE(TakeSigningSecret(std::string(32, 'x')));
  key_ = jwt;
  EXPECT_EQ(Ask("GET", "auth/apikey/me").status, 401);
  Restart();
  EXPECT_EQ(Get("auth/apikey/me")["name"], "r");
  EXPECT_FALSE(TakeSigningSecret("short"));
}

TEST_F(TinkerAccountsTest, AJwtThatIsNotGoodIsRefusedAsTheSdkExpects) {
  const std::string key = AddKey("r", {Scope::kRead});
  Start();
  key_ = key;
  const std::string jwt = Post("auth/token")["jwt"];
  const std::vector<std::string> parts = absl::StrSplit(jwt, '.');
  ASSERT_EQ(parts.size(), 3u);
  std::string other = parts[2];
  other[5] = other[5] == '0' ? '1' : '0';
  for (const std::string& bad :
       {absl::StrCat(parts[0], ".", parts[1], ".", other),
        absl::StrCat(parts[0], ".", parts[0], ".", parts[2]),
        absl::StrCat(parts[0], ".", parts[1]), std::string("eyJ"),
        absl::StrCat(jwt, ".", parts[2])}) {
    key_ = bad;
    const HttpReply reply = Ask("GET", "sessions");
    EXPECT_EQ(reply.status, 401) << bad;
    EXPECT_THAT(reply.headers,
                ElementsAre(std::pair("WWW-Authenticate",
                                      R"(Bearer error="invalid_token")")));
  }
  const absl::Time now = absl::Now();
  EXPECT_TRUE(ReadJwt(jwt, now).ok());
  EXPECT_EQ(ReadJwt(jwt, now + kJwtLifetime).status().code(),
            absl::StatusCode::kUnauthenticated);
  // The hash is of no token of the server.
  key_ = *MakeJwt(Caller(), "", now);
  EXPECT_EQ(Ask("GET", "sessions").status, 401);
}

TEST_F(TinkerAccountsTest, UsageIsCountedByTheHourAndOutlivesTheFront) {
  const std::string session = StartSession();
  const std::string model = Result(CreateModel(session))["model_id"];
  (void)Result(Train(model, 1));
  (void)Result(Post("save_weights",
                    {{"model_id", model}, {"seq_id", 2}, {"path", "kept"}}));
  (void)Drawn({{"base_model", "toy"}});
  for (const bool restarted : {false, true}) {
    if (restarted) {
      OnFront([](Front& front) { front.accounts.Sweep(absl::Now()); });
      Restart();
    }
    const Json usage = Usage();
    Json infos = Json::object();
    for (const Json& event : usage["data"]) {
      const Json& info = event["event_info"];
      const std::string type = info["type"];
      infos[info.value("cached", false) ? "cached" : type] = info;
      EXPECT_EQ(event.contains("session_id"),
                type == "training" || type == "checkpoint");
      EXPECT_EQ(event["base_model"], "toy");
    }
    EXPECT_EQ(infos["training"]["token_count"], 2);
    EXPECT_EQ(infos["sampling_prefill"]["token_count"], 2);
    EXPECT_EQ(infos["cached"]["token_count"], 1);
    EXPECT_EQ(infos["sampling_sample"]["token_count"], 2);
    EXPECT_EQ(infos["checkpoint"]["count"], 1);
    EXPECT_TRUE(usage["sessions"].contains(session)) << usage;
  }
  OnFront([](Front& front) {
    front.accounts.Sweep(absl::Now() + kUsageTime + absl::Hours(2));
  });
  EXPECT_THAT(Usage()["data"], IsEmpty());
  const std::string path = "billing/usage/events?starting_on=";
  EXPECT_THAT(Refusal("GET", path + "2026-01-01T00:30:00Z&ending_before="
                                    "2026-01-01T01:00:00Z"),
              HasSubstr("must be a whole hour"));
  EXPECT_THAT(Refusal("GET", path + "2026-01-01T00:00:00Z&ending_before="
                                    "2026-01-16T00:00:00Z"),
              HasSubstr("at most 14 days"));
  EXPECT_THAT(Refusal("GET", path + "2999-01-01T00:00:00Z&ending_before="
                                    "2999-01-01T01:00:00Z"),
              HasSubstr("in the future"));
}

TEST_F(TinkerAccountsTest, OneOwnerHasOnlySoManyCounts) {
  Start();
  OnFront([](Front& front) {
    FairBudget& memory = *front.port.core()->memory;
    EXPECT_TRUE(memory.Reserve("", memory.most()).ok());
    for (int64_t i = 0; i < kMaxUsageRows + 10; ++i) {
      front.accounts.Count("", absl::StrCat("s", i), {.train_tokens = 1});
    }
    int64_t rows = 0;
    int64_t sum = 0;
    const auto add = [&](const UsageKey& /*key*/, const UsageCounts& counts) {
      ++rows;
      sum += counts.train_tokens;
    };
    const auto count = [&] {
      rows = sum = 0;
      front.accounts.ForEachCount(Caller(), 0, INT64_MAX, add);
    };
    count();
    EXPECT_EQ(rows, kMaxUsageRows + 1);
    EXPECT_EQ(sum, kMaxUsageRows + 10);
    // The owner is charged for them.
    EXPECT_FALSE(memory.Reserve("", memory.most()).ok());
    front.accounts.Count("other", "s", {.train_tokens = 1});
    count();
    EXPECT_EQ(sum, kMaxUsageRows + 11);
  });
}

TEST_F(TinkerAccountsTest, EventsOfCheckpointsAreOfTheirTenant) {
  const std::string acme = AddKey("t", {Scope::kTrain});
  const std::string bolt = AddKey("u", {Scope::kTrain}, "bolt");
  Start();
  key_ = acme;
  const std::string path = SaveSampler(NewSession());
  Restart();
  const std::string copy =
      Post("copy_weights", {{"source_path", path}})["tinker_path"];
  EXPECT_NE(copy, path);
  const std::string run = ParseCheckpointPath(path)->run;
  const HttpReply deleted = Ask(
      "DELETE",
      absl::StrCat("training_runs/", run, "/checkpoints/sampler_weights/kept"));
  EXPECT_EQ(deleted.status, 204) << deleted.body;
  std::vector<std::string> events;
  const Json log = Get("audit");
  for (const Json& entry : log["entries"]) {
    events.push_back(entry["event"]);
    EXPECT_EQ(entry["event_details"]["actor"], "t");
  }
  EXPECT_THAT(events, ElementsAre("checkpoint_create", "checkpoint_copy",
                                  "checkpoint_delete"));
  EXPECT_EQ(log["entries"][1]["tinker_path"], copy);
  EXPECT_THAT(Get("audit?event_type=teams")["entries"], IsEmpty());
  EXPECT_THAT(Get("audit?day=2020-01-31")["entries"], IsEmpty());
  EXPECT_THAT(Refusal("GET", "audit?day=today"), StartsWith("day must be"));
  for (const char* const day :
       {"infinite-future", "9223372036854775807-12-31"}) {
    EXPECT_THAT(Refusal("GET", absl::StrCat("audit?day=", day)),
                StartsWith("day must be"));
  }
  for (const char* const day : {"1677-01-01", "1969-12-31", "2999-01-01"}) {
    EXPECT_THAT(Get(absl::StrCat("audit?day=", day))["entries"], IsEmpty());
  }
  key_ = bolt;
  EXPECT_THAT(Get("audit")["entries"], IsEmpty());
}

TEST_F(TinkerAccountsTest, StorageIsThatOfTheTenantsCheckpoints) {
  const std::string acme = AddKey("t", {Scope::kTrain});
  const std::string bolt = AddKey("u", {Scope::kTrain}, "bolt");
  Start();
  key_ = acme;
  const std::string path = SaveSampler(NewSession());
  (void)Post("copy_weights", {{"source_path", path}});
  const Json data = Get("billing/usage/checkpoints/current")["data"];
  ASSERT_EQ(data.size(), 1u) << data;
  EXPECT_EQ(data[0]["checkpoint_count"], 2);
  EXPECT_EQ(data[0]["size_bytes"], 8192);
  EXPECT_THAT(Refusal("GET", "billing/usage/checkpoints/current?project_id=p"),
              HasSubstr("project_id is not offered"));
  key_ = bolt;
  EXPECT_THAT(Get("billing/usage/checkpoints/current")["data"], IsEmpty());
}

TEST_F(TinkerAccountsTest, WithoutTokensTheStorageIsThatOfOneOrganization) {
  const std::string path = SaveSampler(StartSession());
  (void)Post("copy_weights", {{"source_path", path}});
  const Json data = Get("billing/usage/checkpoints/current")["data"];
  ASSERT_EQ(data.size(), 1u) << data;
  EXPECT_EQ(data[0]["checkpoint_count"], 2);
  EXPECT_EQ(data[0]["org_user_urn"], "weft");
}

TEST_F(TinkerAccountsTest, ACopyIsMadeOnce) {
  const std::string session = StartSession();
  const std::string path = SaveSampler(session);
  const auto copy = [&](const Json& fields) {
    Json body = fields;
    body["source_path"] = path;
    return Post("copy_weights", body)["tinker_path"].get<std::string>();
  };
  idempotency_key_ = "k";
  const std::string first = copy(Json::object());
  EXPECT_EQ(copy(Json::object()), first);
  idempotency_key_ = "l";
  const std::string second = copy({{"ttl_seconds", 7200}});
  EXPECT_NE(second, first);
  const auto expires = [&] {
    const Json found = Get(absl::StrCat(
        "training_runs/", ParseCheckpointPath(second)->run, "/checkpoints"));
    return found["checkpoints"][0].value("expires_at", "");
  };
  // A request that comes again leaves the copy its lifetime.
  const std::string once = expires();
  EXPECT_EQ(once, TimeText(kCannedCreation + absl::Seconds(7200)));
  EXPECT_EQ(copy({{"ttl_seconds", 9000}}), second);
  EXPECT_EQ(expires(), once);
  EXPECT_EQ(Calls("UploadCheckpoint"), 2);
  const Json place = {{"session_id", session}, {"model_seq_id", 5}};
  EXPECT_EQ(copy(place), absl::StrCat("tinker://", session,
                                      ":train:5/sampler_weights/kept"));
  // The same again, and a copy of the copy to its place.
  copy(place);
  EXPECT_EQ(Get("audit")["entries"].size(), 4u);  // A save and three copies.
  Json other = place;
  other["source_path"] = second;
  EXPECT_THAT(Refusal("POST", "copy_weights", other), HasSubstr("exists"));
  // The same key with another source makes another copy.
  EXPECT_NE(Post("copy_weights", {{"source_path", first}})["tinker_path"],
            second);
  EXPECT_THAT(Refusal("POST", "copy_weights",
                      {{"source_path", path},
                       {"session_id", session},
                       {"model_seq_id", 0}}),
              HasSubstr("model_seq_id is 0"));
  idempotency_key_ = "m";
  EXPECT_NE(copy({{"destination_project_id", "p"}}), first);
  EXPECT_THAT(Refusal("POST", "copy_weights",
                      {{"source_path", path}, {"weights_access_token", "t"}}),
              HasSubstr("weights_access_token is not offered"));
}

TEST_F(TinkerAccountsTest, AnOwnerCopiesOneCheckpointAtATime) {
  const Json body = {{"source_path", SaveSampler(StartSession())}};
  // The front takes both requests before the engine has answered the first.
  std::vector<std::future<HttpReply>> replies;
  OnFront([&](Front&) {
    for (int i = 0; i < 2; ++i) {
      replies.push_back(AskLater("POST", "copy_weights", body));
    }
  });
  EXPECT_EQ(replies[0].get().status, 200);
  const HttpReply refused = replies[1].get();
  EXPECT_EQ(refused.status, 429);
  EXPECT_GT(refused.retry_after_seconds, 0);
  for (int i = 0; i < 2; ++i) (void)Post("copy_weights", body);
  engine_->FailNext(absl::InternalError("no"), "UploadCheckpoint");
  EXPECT_EQ(Ask("POST", "copy_weights", body).status, 500);
  (void)Post("copy_weights", body);
}

TEST_F(TinkerAccountsTest, SessionsAreFoundByNameAndMetadata) {
  Start();
  std::vector<std::string> ids;
  for (const char* const name : {"Nightly one", "nightly two", "other"}) {
    ids.push_back(Post("create_session",
                       {{"display_name", name},
                        {"user_metadata", {{"n", name}}}})["session_id"]);
  }
  const auto find = [this](const Json& body) {
    std::vector<std::string> found;
    const Json reply = Post("sessions/search", body);
    for (const Json& session : reply["sessions"]) {
      found.push_back(session["session_id"]);
    }
    return found;
  };
  EXPECT_THAT(find(Json::object()), ElementsAre(ids[2], ids[1], ids[0]));
  EXPECT_THAT(find({{"display_name", "NIGHT one"}}), ElementsAre(ids[0]));
  EXPECT_THAT(find({{"session_id", ids[1]}}), ElementsAre(ids[1]));
  EXPECT_THAT(find({{"session_id", ids[1]}, {"display_name", "other"}}),
              ElementsAre(ids[2], ids[1]));
  EXPECT_THAT(find({{"user_metadata", {{"n", "other"}}}}), ElementsAre(ids[2]));
  EXPECT_THAT(find({{"statuses", {{{"type", "failed"}}}}}), IsEmpty());
  EXPECT_THAT(find({{"owner", {{"type", "accessible"}}},
                    {"statuses", {{{"type", "active"}}}}}),
              ElementsAre(ids[2], ids[1], ids[0]));
  const Json page = Post("sessions/search", {{"limit", 2}});
  EXPECT_EQ(page["sessions"].size(), 2u);
  EXPECT_THAT(find({{"cursor", page["next_cursor"]}}), ElementsAre(ids[0]));
  const auto refusal = [this](const Json& body) {
    return Refusal("POST", "sessions/search", body);
  };
  EXPECT_THAT(refusal({{"project_ids", {"p"}}}), StartsWith("project_ids is"));
  EXPECT_THAT(refusal({{"owner", {{"type", "user"}}}}), StartsWith("owner of"));
  EXPECT_THAT(refusal({{"owner", {{"type", 3}}}}), StartsWith("type must be"));
  EXPECT_THAT(refusal({{"statuses", 3}}), StartsWith("statuses must be"));
  EXPECT_THAT(refusal({{"limit", 201}}), StartsWith("limit is 201"));
  EXPECT_THAT(refusal({{"user_metadata", 3}}), StartsWith("user_metadata"));
  EXPECT_THAT(
      Refusal("GET", absl::StrCat("sessions/", ids[0], "/trace_export")),
      HasSubstr("`weftctl profile --time 10s -o trace.json`"));
}

TEST_F(TinkerAccountsTest, ASampleMayNameACheckpoint) {
  const std::string session = StartSession();
  const std::string path = SaveSampler(session);
  const Json drawn = Drawn({{"model_path", path}});
  EXPECT_EQ(drawn["sequences"].size(), 1u) << drawn;
  EXPECT_EQ(Drawn({{"model_path", path}, {"base_model", "toy"}}), drawn);
  std::vector<std::string> events;
  const Json log = Get("audit");
  for (const Json& entry : log["entries"]) events.push_back(entry["event"]);
  EXPECT_THAT(events, ElementsAre("checkpoint_create", "checkpoint_read"));
  OnFront([](Front& front) { EXPECT_EQ(front.samplers.size(), 0u); });
  EXPECT_THAT(Drawn({{"model_path", path + "x"}}).value("error", ""),
              StartsWith("model_path: no checkpoint"));
  EXPECT_THAT(Drawn({{"model_path", "x"}}).value("error", ""),
              StartsWith("model_path is \"x\""));
  EXPECT_THAT(Refusal("POST", "asample", Json::object()),
              HasSubstr("model_path or base_model"));
}

}  // namespace
}  // namespace weft::server::tinker
