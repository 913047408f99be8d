#include "server/flags/flags.h"

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/flags/config_file.h"
#include "server/flags/flag_table.h"
#include "tests/support/temp_folder.h"

namespace weft::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

absl::StatusOr<Settings> Parse(
    const std::vector<std::string>& args,
    const std::map<std::string, std::string>& environment = {}) {
  return ParseSettings(
      args, [&](const std::string& name) -> std::optional<std::string> {
        const auto found = environment.find(name);
        if (found == environment.end()) return std::nullopt;
        return found->second;
      });
}

std::string Error(const std::vector<std::string>& args,
                  const std::map<std::string, std::string>& environment = {}) {
  return std::string(Parse(args, environment).status().message());
}

TEST(FlagsTest, ReadsEveryTypeInBothSpellings) {
  const auto settings =
      Parse({"--model=/m/toy/", "--device", "cuda", "--dtype=bf16",
             "--weights=int8", "--sampling-share", "0.25",
             "--kv-cache-bytes=123456789012", "--trusted-network",
             "--loss-chunk-size", "-1", "--log-level=error",
             "--log-format=json", "--metrics-listen="})
          .value();
  EXPECT_EQ(settings.engine.model_dir, "/m/toy/");
  EXPECT_EQ(settings.server.model_name, "toy");
  EXPECT_EQ(settings.engine.device, Device::kCuda);
  EXPECT_EQ(settings.engine.dtype, Dtype::kBf16);
  EXPECT_EQ(settings.engine.base_weights, BaseWeights::kInt8);
  EXPECT_EQ(settings.engine.sampling_share, 0.25);
  EXPECT_EQ(settings.engine.kv_cache_bytes, 123456789012);
  EXPECT_EQ(settings.engine.loss_chunk_size, -1);
  EXPECT_TRUE(settings.server.trusted_network);
  EXPECT_EQ(settings.server.log_level, LogLevel::kError);
  EXPECT_EQ(settings.server.log_style, LogStyle::kJson);
  EXPECT_EQ(settings.server.metrics_listen, "");
  EXPECT_FALSE(Parse({"--no-trusted-network"})->server.trusted_network);
  EXPECT_FALSE(Parse({"--no-decode-graphs"})->engine.decode_graphs);
  EXPECT_TRUE(Parse({"--help"})->help);
  EXPECT_TRUE(Parse({"--version"})->version);
  EXPECT_TRUE(Parse({"--check-config"})->check_config);
  EXPECT_EQ(Parse({"--device-memory-bytes=80000000000"})->device_memory_bytes,
            80000000000);
}

TEST(FlagsTest, AcceptsTheChunkSizesThatItsHelpNames) {
  std::string help;
  for (const Flag& flag : FlagTable()) {
    if (flag.name == "loss-chunk-size") help = flag.help;
  }
  EXPECT_THAT(help, HasSubstr("0 or -1: all"));
  const auto accepts = [](const std::string& rows) {
    return ValidateSettings(*Parse({"--model=m", "--loss-chunk-size=" + rows}))
        .ok();
  };
  EXPECT_TRUE(accepts("1"));
  EXPECT_TRUE(accepts("0"));
  EXPECT_TRUE(accepts("-1"));
  EXPECT_FALSE(accepts("-2"));
}

TEST(FlagsTest, FlagBeatsEnvironmentBeatsDefault) {
  const std::map<std::string, std::string> environment = {
      {"WEFT_MAX_RANK", "16"}, {"WEFT_TRUSTED_NETWORK", "true"}};
  EXPECT_EQ(Parse({}, environment)->engine.max_rank, 16);
  EXPECT_TRUE(Parse({}, environment)->server.trusted_network);
  EXPECT_EQ(Parse({"--max-rank=8"}, environment)->engine.max_rank, 8);
  EXPECT_FALSE(
      Parse({"--no-trusted-network"}, environment)->server.trusted_network);
}

TEST(FlagsTest, AListGrowsWithinItsSource) {
  using Names = std::vector<std::string>;
  const std::map<std::string, std::string> environment = {
      {"WEFT_MODEL_ALIAS", "a,b"}};
  EXPECT_EQ(Parse({}, environment)->server.model_aliases, (Names{"a", "b"}));
  // The flag takes precedence over the environment, as for all other values.
  const auto both =
      Parse({"--model-alias=c", "--model-alias", "t~d"}, environment);
  EXPECT_EQ(both->server.model_aliases, (Names{"c", "t~d"}));
}

// A file of settings that exists during the test.
class ConfigFileTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& text) {
    return "--config=" + folder_.Write("config.json", text);
  }

  const TempFolder folder_;
};

TEST_F(ConfigFileTest, ComesBetweenEnvironmentAndDefault) {
  const std::string config = Write(R"({
    // Comments are for people.
    "max-rank": 16, "sampling-share": 0.25, "trusted-network": true,
    "dtype": "bf16", "model": "/m/toy", "loss-chunk-size": -1
  })");
  const auto settings = Parse({config}).value();
  EXPECT_EQ(settings.engine.max_rank, 16);
  EXPECT_EQ(settings.engine.sampling_share, 0.25);
  EXPECT_EQ(settings.engine.dtype, Dtype::kBf16);
  EXPECT_EQ(settings.engine.loss_chunk_size, -1);
  EXPECT_TRUE(settings.server.trusted_network);
  EXPECT_EQ(settings.server.model_name, "toy");
  EXPECT_EQ(Parse({config}, {{"WEFT_MAX_RANK", "8"}})->engine.max_rank, 8);
  EXPECT_EQ(Parse({config, "--max-rank=4"}, {{"WEFT_MAX_RANK", "8"}})
                ->engine.max_rank,
            4);
  EXPECT_EQ(Parse({}, {{"WEFT_CONFIG", folder_.path() + "/config.json"}})
                ->engine.max_rank,
            16);
}

TEST_F(ConfigFileTest, NamesEveryMistakeAtOnce) {
  EXPECT_THAT(Error({Write(R"({"max-rnak": 8, "threads": "many", "help": true,
                               "trusted-network": true, "trusted-network": false})"),
                     "--max-samples=x"}),
              AllOf(HasSubstr("unknown setting \"max-rnak\"; did you mean "
                              "--max-rank?"),
                    HasSubstr("threads=many is not a whole number"),
                    HasSubstr("\"help\" cannot be set in a file"),
                    HasSubstr("\"trusted-network\" comes twice"),
                    HasSubstr("--max-samples=x is not a whole number")));
}

TEST_F(ConfigFileTest, RefusesWhatIsNoFlatObject) {
  EXPECT_THAT(Error({Write("{\n\"max-rank\": 8,\n}")}),
              HasSubstr(":3: not JSON at column 1"));
  EXPECT_THAT(Error({Write("")}), HasSubstr(":1: not JSON"));
  EXPECT_THAT(Error({Write(R"({"sampling-share": 1e999})")}),
              HasSubstr("has a number that is out of range"));
  EXPECT_THAT(Error({Write("[]")}), HasSubstr("is not a JSON object"));
  EXPECT_THAT(Error({Write("7")}), HasSubstr("is not a JSON object"));
  EXPECT_THAT(Error({Write(R"({"model": ["a"]})")}),
              HasSubstr("\"model\" is an array"));
  EXPECT_THAT(Error({Write(R"({"model": null})")}),
              HasSubstr("\"model\" has no value"));
  EXPECT_THAT(Error({"--config=/no/such/file"}), HasSubstr("cannot be read"));
  EXPECT_THAT(Error({"--config=/"}), HasSubstr("Is a directory"));
}

TEST_F(ConfigFileTest, WhatIsPrintedReadsBackAsTheSameSettings) {
  const auto settings = Parse({"--model=/m/\"a\"", "--max-rank=7",
                               "--sampling-share=0.3", "--no-share-prompts"},
                              {{"WEFT_DTYPE", "bf16"}})
                            .value();
  const std::string text = ConfigText(settings);
  EXPECT_THAT(text, HasSubstr("\"max-rank\": 7,  // --max-rank\n"));
  EXPECT_THAT(text, HasSubstr("\"dtype\": \"bf16\",  // WEFT_DTYPE\n"));
  const auto again = Parse({Write(text)}).value();
  for (const Flag& flag : FlagTable()) {
    if (flag.is_action || flag.name == "config") continue;
    EXPECT_EQ(flag.show(again), flag.show(settings)) << flag.name;
  }
}

TEST(FlagsTest, AFlagThatIsGoneSaysWhatReplacedIt) {
  for (const char* name :
       {"requests", "tokens", "requests-per-tenant", "tokens-per-tenant"}) {
    EXPECT_THAT(Error({absl::StrCat("--max-queue-", name, "=4")}),
                HasSubstr("it is gone: what waits is limited by its bytes, for "
                          "all tenants by --request-memory"));
  }
}

TEST(FlagsTest, UnknownFlagSuggestsANearOne) {
  EXPECT_EQ(Error({"--max-rnak=8"}),
            "unknown flag --max-rnak; did you mean --max-rank?");
  EXPECT_EQ(Error({"--metrics"}),
            "unknown flag --metrics; did you mean --metrics-listen?");
  EXPECT_EQ(Error({"--zzzzzz"}), "unknown flag --zzzzzz; see --help");
  EXPECT_THAT(Error({"--no-model"}), HasSubstr("unknown flag --no-model"));
}

TEST(FlagsTest, NamesEveryMistakeAtOnce) {
  EXPECT_THAT(
      Error({"--max-rank=many", "stray", "--threads"}, {{"WEFT_DTYPE", "f16"}}),
      AllOf(HasSubstr("--max-rank=many is not a whole number"),
            HasSubstr("unexpected argument stray"),
            HasSubstr("--threads needs a value: N"),
            HasSubstr("WEFT_DTYPE=f16 is not auto or f32 or bf16")));
}

TEST(FlagsTest, RefusesNumbersThatDoNotFit) {
  for (const char* text : {"", "1.5", "99999999999999999999", "0x10", "8k"}) {
    EXPECT_THAT(Error({std::string("--max-rank=") + text}), Not(IsEmpty()))
        << text;
  }
}

TEST(FlagsTest, ExplainsKubernetesServiceLinks) {
  EXPECT_THAT(Error({}, {{"WEFT_LISTEN", "tcp://10.0.0.7:50051"}}),
              HasSubstr("Kubernetes service link"));
  const auto settings = Parse({}, {{"WEFT_STATE", "s3://bucket/prefix"}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->engine.state, "s3://bucket/prefix");
}

TEST(FlagsTest, ValidateListsEngineAndServerComplaints) {
  const auto settings = Parse({"--max-rank=0", "--max-samples=0"}).value();
  EXPECT_THAT(std::string(ValidateSettings(settings).message()),
              AllOf(HasSubstr("--model is required"), HasSubstr("--max-rank=0"),
                    HasSubstr("--max-samples=0")));
  EXPECT_TRUE(ValidateSettings(*Parse({"--model=m"})).ok());
}

TEST(FlagsTest, NamesEveryValueOutOfRangeAtOnce) {
  const auto settings =
      Parse({"--model=m", "--max-rank=0", "--threads=-1",
             "--device-memory-share=0.01", "--sampling-share=nan",
             "--state=s3://b/p", "--logs=1001",
             // gRPC's limit is an int.
             "--max-message-bytes=2147483648"})
          .value();
  EXPECT_THAT(
      std::string(ValidateSettings(settings).message()),
      AllOf(HasSubstr("--max-rank=0 must be from 1 to 1024"),
            HasSubstr("--threads=-1 must be from 0 to 4096"),
            HasSubstr("--device-memory-share=0.01 must be from 0.05 to 1"),
            HasSubstr("--sampling-share=nan"),
            HasSubstr("--logs=1001 must be from 1 to 1000"),
            HasSubstr("--max-message-bytes=2147483648 must be from 1024 to "
                      "2147483647")));
}

TEST(FlagsTest, OnlyCheckConfigIsToldTheDevicesMemory) {
  const auto problem = [](const std::vector<std::string>& args) {
    return std::string(ValidateSettings(*Parse(args)).message());
  };
  EXPECT_THAT(problem({"--model=m", "--device-memory-bytes=1"}),
              HasSubstr("--device-memory-bytes goes with --check-config"));
  EXPECT_THAT(
      problem({"--model=m", "--check-config", "--device-memory-bytes=-1"}),
      HasSubstr("--device-memory-bytes=-1 must be from 0 to "));
  EXPECT_EQ(problem({"--model=m", "--check-config", "--device-memory-bytes=1"}),
            "");
}

TEST(FlagsTest, HelpIsNarrowAndComplete) {
  const std::string help = HelpText();
  for (const absl::string_view line : absl::StrSplit(help, '\n')) {
    EXPECT_LE(line.size(), 100u) << line;
  }
  for (const Flag& flag : FlagTable()) {
    EXPECT_THAT(help, HasSubstr("  --" + flag.name));
    EXPECT_FALSE(flag.help.empty());
    if (flag.environment().empty()) continue;
    EXPECT_THAT(help, HasSubstr("[env: " + flag.environment() + "]"));
    EXPECT_THAT(help, HasSubstr(flag.default_value));
    EXPECT_THAT(help, HasSubstr(flag.range));
  }
}

TEST(FlagsTest, TakesUnitsOfBytesAndTime) {
  const auto bytes = [](const char* text) {
    const auto settings = Parse({absl::StrCat("--kv-cache-bytes=", text)});
    return settings.ok() ? settings->engine.kv_cache_bytes : -1;
  };
  EXPECT_EQ(bytes("4096"), 4096);
  EXPECT_EQ(bytes("4GiB"), int64_t{4} << 30);
  EXPECT_EQ(bytes("1.5MiB"), 3 << 19);
  EXPECT_EQ(bytes("2GB"), 2'000'000'000);
  for (const char* text :
       {"4G", "GiB", "4 gib", "1e30TiB", "nanMiB", "4GiBs"}) {
    EXPECT_EQ(bytes(text), -1) << text;
  }
  const auto seconds = [](const char* text) {
    const auto settings =
        Parse({absl::StrCat("--drain-timeout-seconds=", text)});
    return settings.ok() ? settings->server.drain_timeout_seconds : -1;
  };
  EXPECT_EQ(seconds("90"), 90);
  EXPECT_EQ(seconds("90s"), 90);
  EXPECT_EQ(seconds("1h30m"), 5400);
  for (const char* text : {"1.5s", "90 s", "inf", "2d", "99999999999h"}) {
    EXPECT_EQ(seconds(text), -1) << text;
  }
  EXPECT_EQ(Error({"--kv-cache-bytes=4G"}),
            "--kv-cache-bytes=4G is not a number of bytes, such as 4096 or "
            "4GiB");
  EXPECT_EQ(Error({"--drain-timeout-seconds=x"}),
            "--drain-timeout-seconds=x is not a number of seconds, such as 90 "
            "or 2m");
}

TEST(FlagsTest, HelpAboutAWordHasItsFlagsAlone) {
  const auto settings = Parse({"--help=Snapshot"}).value();
  EXPECT_TRUE(settings.help);
  const std::string help = HelpText(settings.help_word);
  EXPECT_THAT(help, AllOf(HasSubstr("  --snapshot-log-bytes BYTES\n"),
                          HasSubstr("  --state-dir DIR\n"),
                          Not(HasSubstr("--max-rank"))));
  EXPECT_EQ(HelpText("zzz"), "");
}

TEST(FlagsTest, NamesVariablesThatSetNothing) {
  const char* const environment[] = {"PATH=/bin",           "WEFT_MAX_RANK=8",
                                     "WEFT_MAX_RANKS=8",    "WEFT_TOKEN=weft_",
                                     "WEFT_TOKENS_FILE=/t", nullptr};
  EXPECT_THAT(UnknownVariables(environment),
              ElementsAre("WEFT_MAX_RANKS sets no flag of weftd; did you mean "
                          "--max-rank?",
                          "WEFT_TOKENS_FILE sets no flag of weftd; see "
                          "--help"));
}

TEST(FlagsTest, AServiceOfKubernetesMaySetVariables) {
  const char* const environment[] = {"WEFT_PORT=tcp://10.0.0.7:50051",
                                     "WEFT_PORT_50051_TCP=tcp://10.0.0.7:50051",
                                     "WEFT_PORT_50051_TCP_ADDR=10.0.0.7",
                                     "WEFT_PORT_50051_TCP_PORT=50051",
                                     "WEFT_SERVICE_HOST=10.0.0.7",
                                     "WEFT_SERVICE_PORT_GRPC=50051",
                                     nullptr};
  EXPECT_THAT(UnknownVariables(environment), IsEmpty());
}

}  // namespace
}  // namespace weft::server
