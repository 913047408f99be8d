#include "client/weftctl/weftctl.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/weft_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/canned_server.h"
#include "tests/support/temp_folder.h"

namespace weft::client::weftctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class WeftctlTest : public ::testing::Test {
 protected:
  // Runs a command line against a canned server and keeps its output.
  int Run(std::vector<std::string> given) {
    out_.str("");
    err_.str("");
    setenv("WEFT_SERVER", server_.target().c_str(), 1);
    return RunWeftctl(given, {.out = out_, .err = err_});
  }

  nlohmann::json Json() { return nlohmann::json::parse(out_.str()); }

  // Makes an adapter and takes one optimizer step.
  void Train(const std::string& id) {
    const auto client = Client::Connect({.target = server_.target()});
    const auto adapter = (*client)->CreateAdapter(id, {});
    v1::LossConfig loss;
    loss.set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
    const auto datum = client::NextTokenDatum({1, 2, 3});
    auto gradient = (*adapter)->ForwardBackward({*datum}, loss);
    auto update = (*adapter)->OptimStep({});
    EXPECT_TRUE(gradient.get().ok() && update.get().ok());
  }

  CannedServer server_;
  std::ostringstream out_;
  std::ostringstream err_;
};

// Docker puts the proxy of its configuration into each container.
TEST_F(WeftctlTest, AProxyOfTheEnvironmentIsNotForThisMachine) {
  setenv("http_proxy", "http://127.0.0.1:9", 1);
  EXPECT_EQ(Run({"health"}), 0) << err_.str();
  unsetenv("http_proxy");
}

TEST_F(WeftctlTest, ShowsTheServerAsJsonAndTable) {
  EXPECT_EQ(Run({"info", "-o", "json"}), 0);
  EXPECT_EQ(Json()["model"]["name"], "toy");
  EXPECT_EQ(Json()["draining"], false);
  EXPECT_GT(Json()["load"]["uptime_seconds"], 0);
  EXPECT_EQ(Run({"info"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("model            toy\n"));
  EXPECT_THAT(out_.str(), HasSubstr("state            serving\n"));
  EXPECT_THAT(out_.str(), HasSubstr("trained tokens   0\n"));
}

TEST_F(WeftctlTest, DrainsSavesAllAndTakesWorkAgain) {
  Train("a");
  Train("b");
  EXPECT_EQ(Run({"drain", "--save-all"}), 0) << err_.str();
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("a/drain-20"), HasSubstr("b/drain-20")));
  EXPECT_EQ(Run({"checkpoints", "list", "b"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("drain-20"));
  EXPECT_EQ(Run({"info"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("draining: takes no new work\n"));
  EXPECT_EQ(Run({"undrain"}), 0) << err_.str();
  EXPECT_EQ(Run({"info"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("state            serving\n"));
  EXPECT_EQ(Run({"state", "snapshot"}), 0) << err_.str();
}

TEST_F(WeftctlTest, AViewOfAServerThatIsNotThereEndsAtOnce) {
  const absl::Time start = absl::Now();
  for (const char* view : {"info", "adapters list"}) {
    std::vector<std::string> words = absl::StrSplit(view, ' ');
    words.emplace_back("--server=unix:/no/such/socket");
    EXPECT_EQ(Run(words), 1) << view;
    EXPECT_THAT(err_.str(), HasSubstr("UNAVAILABLE"));
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
}

TEST_F(WeftctlTest, HealthIsTheExitCode) {
  EXPECT_EQ(Run({"health", "--timeout", "2s"}), 0);
  EXPECT_EQ(Run({"health", "--service=liveness"}), 0);
  EXPECT_EQ(Run({"health", "--service=unknown"}), 1);
  EXPECT_EQ(Run({"health"}), 0);
  EXPECT_EQ(out_.str(), "SERVING\n");
  server_.StartDraining();
  EXPECT_EQ(Run({"health", "-o", "json", "--timeout=20s"}), 1);
  EXPECT_EQ(Json()["status"], "NOT_SERVING");
  EXPECT_EQ(Run({"health", "--service", "liveness", "--timeout=20s"}), 0);
  EXPECT_EQ(Run({"health", "--server=unix:/no/such/socket", "--timeout=2s"}),
            1);
  EXPECT_THAT(err_.str(), HasSubstr("UNAVAILABLE"));
}

TEST_F(WeftctlTest, WritesAProfileOfTheEngine) {
  const TempFolder folder;
  const std::string path = folder.path() + "/profile.json";
  EXPECT_EQ(Run({"profile", "--time=50ms", "-o", path}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("to " + path));
  std::ifstream file(path);
  EXPECT_FALSE(nlohmann::json::parse(file)["traceEvents"].empty());
  EXPECT_EQ(Run({"profile", "--time=301s", "-o", path}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("INVALID_ARGUMENT: seconds"));
  EXPECT_EQ(Run({"profile", "--steps=4294967296", "-o", path}), 2);
  EXPECT_EQ(Run({"profile", "--time=50ms", "-o", "/dev/null/none"}), 1);
}

TEST_F(WeftctlTest, RefusesNumbersThatTheirFieldsCannotHold) {
  // 2^32 + 4 must not become 4.
  EXPECT_EQ(Run({"adapters", "create", "a", "--rank=4294967300"}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("--rank: '4294967300'"));
  for (const char* flag : {"--max-tokens=4294967300", "--top-k=4294967300",
                           "--num-samples=4294967300"}) {
    EXPECT_EQ(Run({"sample", "--prompt-tokens=1", flag}), 2) << flag;
  }
}

TEST_F(WeftctlTest, ManagesAdapters) {
  EXPECT_EQ(Run({"adapters", "create", "a", "--rank", "4", "--seed=7",
                 "--target-modules", "q_proj,lm_head", "-o", "json"}),
            0);
  EXPECT_EQ(Json()["config"]["rank"], 4);
  EXPECT_EQ(Json()["config"]["target_modules"][1], "TARGET_MODULE_LM_HEAD");
  EXPECT_EQ(Run({"adapters", "create", "a"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("ALREADY_EXISTS: adapter_id: 'a' exists"));
  EXPECT_EQ(Run({"adapters", "create", "b"}), 0);
  EXPECT_EQ(Run({"adapters", "list", "-o", "json"}), 0);
  EXPECT_EQ(Json()["adapters"].size(), 2);
  EXPECT_EQ(Run({"adapters", "list"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("ADAPTER  TENANT  STATE  RANK"));
  EXPECT_EQ(Run({"adapters", "get", "b"}), 0);
  EXPECT_EQ(Run({"adapters", "delete", "b"}), 0);
  EXPECT_EQ(Run({"adapters", "get", "b"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("NOT_FOUND"));
}

TEST_F(WeftctlTest, GivesNewAdaptersTheirTenantAndDurability) {
  const TempFolder folder;
  folder.Write("adapter_config.json", "{}");
  folder.Write("adapter_model.safetensors", "weights");
  const std::vector<std::vector<std::string>> lines = {
      {"adapters", "create", "made"}, {"import", "imported", folder.path()}};
  for (std::vector<std::string> line : lines) {
    line.insert(line.end(), {"--tenant=alice", "--durability=step"});
    EXPECT_EQ(Run(line), 0) << err_.str();
    line.back() = "--durability=disk";
    EXPECT_EQ(Run(line), 2);
    EXPECT_THAT(err_.str(), HasSubstr("--durability: 'disk'"));
  }
  for (const char* name : {"made", "imported"}) {
    EXPECT_EQ(Run({"adapters", "get", name, "-o", "json"}), 0);
    EXPECT_EQ(Json()["durability"], "DURABILITY_STEP") << name;
  }
  EXPECT_EQ(Run({"adapters", "list"}), 0);
  for (const char* row : {"made      alice", "imported  alice"}) {
    EXPECT_THAT(out_.str(), HasSubstr(row));
  }
  EXPECT_EQ(Run({"checkpoints", "save", "made", "one"}), 0);
  EXPECT_EQ(Run({"checkpoints", "load", "new", "one", "--source=made",
                 "--tenant=alice", "--durability=step", "-o", "json"}),
            0);
  EXPECT_EQ(Json()["tenant"], "alice");
  EXPECT_EQ(Json()["durability"], "DURABILITY_STEP");
  EXPECT_EQ(Run({"checkpoints", "load", "new", "one", "--source=made",
                 "--durability=memory", "-o", "json"}),
            0);
  EXPECT_EQ(Json()["durability"], "DURABILITY_STEP");
  EXPECT_EQ(Run({"checkpoints", "load", "new", "one", "--durability", "disk"}),
            2);
  EXPECT_THAT(err_.str(), HasSubstr("--durability: 'disk'"));
}

TEST_F(WeftctlTest, SamplesTokens) {
  const std::vector<std::string> base = {"sample", "--prompt-tokens", "5,6",
                                         "--max-tokens", "3"};
  EXPECT_EQ(Run({"adapters", "create", "a"}), 0);
  EXPECT_EQ(Run(base), 0);
  EXPECT_EQ(out_.str(), "7,8,9\n");
  std::vector<std::string> given = base;
  given.insert(given.end(),
               {"--temperature=0", "--top-k=4", "--top-p=0.5", "--seed=1",
                "--adapter=a", "--num-samples=2", "-o", "json"});
  EXPECT_EQ(Run(given), 0);
  EXPECT_EQ(Json()["samples"][0]["tokens"], (std::vector<int>{7, 8, 9}));
  const SampleRequest sent = server_.engine().seen().last_sample;
  EXPECT_EQ(sent.config.temperature, 0);
  EXPECT_EQ(sent.config.top_k, 4);
  EXPECT_EQ(sent.config.top_p, 0.5);
  EXPECT_EQ(sent.config.seed, 1);
  EXPECT_EQ(sent.adapter_id, "a");
  EXPECT_EQ(sent.num_samples, 2);
  given = base;
  given.push_back("--stream");
  EXPECT_EQ(Run(given), 0);
  // Each line holds the tokens that were drawn since the previous line.
  const std::string tokens =
      absl::StrReplaceAll(out_.str(), {{"0: ", ""}, {"\n", ","}});
  EXPECT_EQ(tokens, "7,8,9,");
}

TEST_F(WeftctlTest, SamplesFromAChangedDistribution) {
  const auto sample = [this](const std::vector<std::string>& flags) {
    std::vector<std::string> line = {"sample", "--prompt-tokens=5"};
    line.insert(line.end(), flags.begin(), flags.end());
    return Run(line);
  };
  EXPECT_EQ(sample({}), 0);
  EXPECT_EQ(server_.engine().seen().last_sample.config.repetition_penalty, 1);
  EXPECT_TRUE(server_.engine().seen().last_sample.config.logit_bias.empty());
  EXPECT_EQ(sample({"--min-p=0.05", "--repetition-penalty=1.1",
                    "--presence-penalty=-0.5", "--frequency-penalty=0.25",
                    "--logit-bias=3:-100,7:1.5", "--allowed-tokens=7,8",
                    "--max-tokens=4", "--min-tokens=2"}),
            0)
      << err_.str();
  const SamplingConfig sent = server_.engine().seen().last_sample.config;
  EXPECT_EQ(sent.min_p, 0.05);
  EXPECT_EQ(sent.repetition_penalty, 1.1F);
  EXPECT_EQ(sent.presence_penalty, -0.5);
  EXPECT_EQ(sent.frequency_penalty, 0.25);
  EXPECT_EQ(sent.logit_bias,
            (std::vector<std::pair<int32_t, float>>{{3, -100}, {7, 1.5}}));
  EXPECT_EQ(sent.allowed_token_ids, (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(sent.min_tokens, 2);
  for (const char* flag :
       {"--min-p=x", "--repetition-penalty=", "--logit-bias=3",
        "--logit-bias=a:1", "--logit-bias=3:x", "--allowed-tokens=a"}) {
    EXPECT_EQ(sample({flag}), 2) << flag;
  }
  EXPECT_EQ(sample({"--min-p=2"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("min_p"));
}

TEST_F(WeftctlTest, ManagesCheckpointsAndSnapshots) {
  Train("a");
  EXPECT_EQ(Run({"checkpoints", "save", "a", "one"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("4.1 kB"));
  EXPECT_EQ(Run({"checkpoints", "save", "a", "one"}), 1);
  EXPECT_EQ(Run({"checkpoints", "save", "a", "one", "--overwrite"}), 0);
  EXPECT_EQ(Run({"checkpoints", "list", "-o", "json"}), 0);
  EXPECT_EQ(Json()["checkpoints"][0]["name"], "one");
  EXPECT_EQ(Run({"checkpoints", "save", "a", "small", "--kind=sampler",
                 "--metadata=loss=0.5,note=a=b", "--ttl=60", "--keep-newest=3",
                 "-o", "json"}),
            0);
  const auto small = Json()["checkpoints"][0];
  EXPECT_EQ(small["kind"], "CHECKPOINT_KIND_SAMPLER");
  EXPECT_EQ(small["metadata"]["loss"], "0.5");
  EXPECT_EQ(small["metadata"]["note"], "a=b");
  EXPECT_EQ(small["expires_at"], 1700000060);
  EXPECT_EQ(Run({"checkpoints", "list", "a"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("never"));
  EXPECT_THAT(out_.str(), HasSubstr("sampler"));
  EXPECT_EQ(Run({"checkpoints", "expire", "a", "small", "-o", "json"}), 0);
  EXPECT_EQ(Json()["checkpoints"][0]["expires_at"], 0);
  EXPECT_EQ(Run({"checkpoints", "expire", "a", "small", "--ttl=3600"}), 0);
  EXPECT_THAT(out_.str(), Not(HasSubstr("never")));
  EXPECT_EQ(Run({"checkpoints", "expire", "a", "small", "--ttl=-1"}), 2);
  EXPECT_EQ(Run({"checkpoints", "expire", "a", "none"}), 1);
  EXPECT_EQ(Run({"checkpoints", "delete", "a", "small"}), 0);
  for (const char* flag : {"--kind=other", "--metadata=k", "--ttl=-1",
                           "--keep-newest=-1", "--keep-newest=4294967296"}) {
    EXPECT_EQ(Run({"checkpoints", "save", "a", "two", flag}), 2) << flag;
  }
  EXPECT_EQ(Run({"checkpoints", "list", "a"}), 0);
  EXPECT_EQ(Run({"checkpoints", "load", "b", "one", "--source", "a"}), 0);
  EXPECT_EQ(out_.str(), "b is at step 2\n");
  const TempFolder temporary;
  const std::string folder = temporary.path() + "/checkpoint";
  EXPECT_EQ(Run({"checkpoints", "download", "a", "one", folder}), 0);
  EXPECT_EQ(Run({"checkpoints", "download", "a", "none", folder}), 1);
  EXPECT_EQ(Run({"checkpoints", "upload", "c", "two", folder}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("two"));
  EXPECT_EQ(Run({"checkpoints", "upload", "c", "two", folder}), 1);
  EXPECT_EQ(Run({"checkpoints", "upload", "c", "two", folder, "--overwrite"}),
            0);
  EXPECT_EQ(Run({"checkpoints", "delete", "a", "one"}), 0);
  EXPECT_EQ(Run({"checkpoints", "delete", "a", "one"}), 1);
  EXPECT_EQ(Run({"snapshot", "publish", "a", "best"}), 0);
  EXPECT_EQ(out_.str(), "version 2\n");
  EXPECT_EQ(Run({"snapshot", "release", "a", "best"}), 0);
}

TEST_F(WeftctlTest, MovesPeftFolders) {
  const TempFolder folder;
  const std::filesystem::path root = folder.path();
  std::filesystem::create_directories(root / "in");
  std::ofstream(root / "in" / "adapter_config.json") << "{}";
  std::ofstream(root / "in" / "adapter_model.safetensors") << "weights";
  EXPECT_EQ(Run({"import", "a", (root / "in").string()}), 0) << err_.str();
  EXPECT_EQ(Run({"export", "a", (root / "out").string()}), 0) << err_.str();
  EXPECT_TRUE(exists(root / "out" / "adapter_model.safetensors"));
  EXPECT_EQ(Run({"import", "a", (root / "none").string()}), 1);
}

TEST_F(WeftctlTest, AWrongCommandLineEndsWithTwo) {
  const std::vector<std::vector<std::string>> lines = {
      {},
      {"fly"},
      {"adapters"},
      {"adapters", "create"},
      {"info", "extra"},
      {"info", "--colour"},
      {"info", "-o", "yaml"},
      {"info", "--timeout", "soon"},
      {"sample"},
      {"sample", "--prompt-tokens", "a"},
      {"adapters", "create", "a", "--target-modules", "conv"}};
  for (const std::vector<std::string>& line : lines) {
    EXPECT_EQ(Run(line), 2) << err_.str();
    EXPECT_THAT(out_.str(), IsEmpty());
    EXPECT_FALSE(err_.str().empty());
  }
}

TEST_F(WeftctlTest, NamesTheCommandThatIsMeant) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"adapters", "lst"}, "did you mean 'adapters list'?"},
      {{"checkpoint", "list"}, "did you mean 'checkpoints list'?"},
      {{"drian"}, "did you mean 'drain'?"},
      {{"nothing", "alike"}, "of these words (see: weftctl --help)"}};
  for (const auto& [words, message] : cases) {
    EXPECT_EQ(Run(words), 2);
    EXPECT_THAT(err_.str(), HasSubstr(message));
  }
}

TEST_F(WeftctlTest, HelpsPerCommand) {
  EXPECT_EQ(Run({"--help"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("checkpoints save"));
  EXPECT_EQ(Run({"adapters", "create", "--help"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("--rank R"));
  EXPECT_THAT(out_.str(), HasSubstr("weftctl adapters create ADAPTER"));
  EXPECT_EQ(Run({"checkpoints", "list", "-h"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("[ADAPTER]"));
}

}  // namespace
}  // namespace weft::client::weftctl
