// Tests the parts of weftctl that need no server.
#include <sstream>

#include "client/weft_client.h"
#include "client/weftctl/arguments.h"
#include "client/weftctl/data_file.h"
#include "client/weftctl/load_table.h"
#include "client/weftctl/output.h"
#include "client/weftctl/progress_bar.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft::weftctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<FlagSpec> kFlags = {
    {"rank", "R", "", "32"},           {"lr", "RATE", "", "1e-4"},
    {"timeout", "D", "", "10m"},       {"prompt", "IDS", "", ""},
    {"output", "FORMAT", "", "table"}, {"stream", "", "", ""}};

absl::StatusOr<Arguments> Parse(const std::vector<std::string>& given) {
  return Arguments::Parse(given, kFlags, {"ADAPTER", "NAME"}, true);
}

TEST(ArgumentsTest, TakesFlagsBetweenWords) {
  const auto arguments =
      Parse({"--rank", "4", "a", "--lr=0.5", "--stream", "b", "-o", "json"});
  ASSERT_TRUE(arguments.ok()) << arguments.status();
  EXPECT_EQ(arguments->word(0), "a");
  EXPECT_EQ(arguments->word(1), "b");
  EXPECT_EQ(*arguments->GetInt("rank"), 4);
  EXPECT_EQ(*arguments->GetDouble("lr"), 0.5);
  EXPECT_TRUE(arguments->Has("stream"));
  EXPECT_EQ(arguments->GetString("output"), "json");
}

TEST(ArgumentsTest, FallsBackToDefaults) {
  const auto arguments = Parse({"a"});
  ASSERT_TRUE(arguments.ok());
  EXPECT_EQ(*arguments->GetInt("rank"), 32);
  EXPECT_EQ(*arguments->GetDuration("timeout"), absl::Minutes(10));
  EXPECT_TRUE(arguments->GetTokens("prompt")->empty());
  EXPECT_EQ(arguments->word(1), "");
}

TEST(ArgumentsTest, NamesTheFlagOfABadValue) {
  const auto arguments =
      Parse({"a", "--rank=many", "--lr=x", "--timeout=2", "--prompt=1,-2"});
  ASSERT_TRUE(arguments.ok());
  for (const absl::Status& status :
       {arguments->GetInt("rank").status(), arguments->GetDouble("lr").status(),
        arguments->GetDuration("timeout").status(),
        arguments->GetTokens("prompt").status()}) {
    EXPECT_TRUE(IsUsageError(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--"));
  }
}

TEST(ArgumentsTest, RefusesNumbersOutOfRange) {
  const auto given = Parse({"a", "--rank=4294967295", "--timeout=0s"});
  ASSERT_TRUE(given.ok());
  EXPECT_EQ(*given->GetUint32("rank"), 4294967295);
  EXPECT_EQ(given->GetDuration("timeout").status().message(),
            "--timeout: '0s' is not a duration such as 500ms, 2s or 10m");
  const auto above = Parse({"a", "--rank=4294967296"});
  EXPECT_EQ(above->GetUint32("rank").status().message(),
            "--rank: '4294967296' is not a whole number in [0, 2^32)");
  const auto below = Parse({"a", "--rank=-1"});
  EXPECT_TRUE(IsUsageError(below->GetUint32("rank").status()));
  EXPECT_EQ(below->GetInt("rank").status().message(),
            "--rank: '-1' is not a whole number >= 0");
}

TEST(ArgumentsTest, RefusesWhatItDoesNotKnow) {
  for (const std::vector<std::string>& given :
       {std::vector<std::string>{"a", "--rnak=1"},
        {"a", "-rank"},
        {"a", "--rank"},
        {},
        {"a", "b", "c"}}) {
    EXPECT_TRUE(IsUsageError(Parse(given).status()));
  }
  EXPECT_FALSE(IsUsageError(absl::InvalidArgumentError("of the server")));
}

TEST(ReadExamplesTest, ReadsTokensAndPrompts) {
  std::istringstream input(
      "{\"tokens\": [1, 2, 3]}\n\n{\"tokens\": [4, 5, 6], "
      "\"prompt_length\": 2}\n");
  const auto examples = ReadExamples(input, "data");
  ASSERT_TRUE(examples.ok()) << examples.status();
  ASSERT_EQ(examples->size(), 2);
  EXPECT_EQ((*examples)[0].num_scored, 2);
  EXPECT_EQ((*examples)[1].num_scored, 1);
  EXPECT_THAT(client::ReadFloats((*examples)[1].datum.weights_le()),
              ElementsAre(0, 1));
}

TEST(ReadExamplesTest, NamesFileLineAndReason) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{\"text\": \"hello\"}", "python -m weft tokenize"},
      {"{\"tokens\": [1]}", "nothing to learn"},
      {"{\"tokens\": [1, -2]}", "-2 is not a token id"},
      {"{\"tokens\": [1, 4294967296]}", "not a token id"},
      {"{\"tokens\": 5}", "not a list"},
      {"{\"tokens\": [1, 2], \"prompt_length\": -1}", "prompt_length"},
      {"{}", "tokens"},
      {"[1, 2]", "not a JSON object"},
      {"{", "not a JSON object"}};
  for (const auto& [line, reason] : cases) {
    std::istringstream input("{\"tokens\": [1, 2]}\n" + line);
    const auto examples = ReadExamples(input, "data.jsonl");
    EXPECT_TRUE(IsUsageError(examples.status())) << line;
    EXPECT_THAT(std::string(examples.status().message()),
                AllOf(HasSubstr("data.jsonl:2: "), HasSubstr(reason)));
  }
}

TEST(ReadExamplesTest, RefusesAnEmptyFile) {
  std::istringstream input("\n");
  EXPECT_TRUE(IsUsageError(ReadExamples(input, "data").status()));
}

TEST(PrintTableTest, AlignsColumnsWithoutTrailingSpace) {
  std::ostringstream out;
  PrintTable({{"A", "LONG", "C"}, {"long", "b", "c"}}, out);
  EXPECT_EQ(out.str(), "A     LONG  C\nlong  b     c\n");
}

TEST(FormatBytesTest, ChoosesTheUnit) {
  EXPECT_EQ(FormatBytes(999), "999 B");
  EXPECT_EQ(FormatBytes(12'345), "12.3 kB");
  EXPECT_EQ(FormatBytes(5'000'000'000), "5.0 GB");
}

TEST(FormatTimeTest, ShowsADashForNoTime) { EXPECT_EQ(FormatTime(0), "-"); }

TEST(ProgressBarTest, ShowsABarOnATerminalAndLinesElsewhere) {
  const TrainProgress progress{.step = 5,
                               .num_steps = 10,
                               .loss_per_token = 1.5,
                               .tokens_per_second = 100,
                               .grad_norm = 0.25};
  EXPECT_EQ(FormatProgress(progress, 4),
            "[##..] 5/10 loss 1.5000 grad 0.25 100 tok/s");
  std::ostringstream lines;
  ProgressBar plain(lines, false);
  plain.Show(progress);
  plain.Finish();
  EXPECT_EQ(lines.str(), "5/10 loss 1.5000 grad 0.25 100 tok/s\n");
  std::ostringstream screen;
  ProgressBar bar(screen, true);
  bar.Show(progress);
  bar.Finish();
  EXPECT_EQ(screen.str().front(), '\r');
  EXPECT_EQ(screen.str().back(), '\n');
}

v1::Adapter Used(const std::string& id, uint64_t step, double used_at) {
  v1::Adapter adapter;
  adapter.set_adapter_id(id);
  adapter.set_tenant("t");
  adapter.set_last_step(step);
  adapter.set_last_used_at(used_at);
  return adapter;
}

TEST(LoadTableTest, RatesCompareWithTheSampleBefore) {
  LoadSample before{.seconds = 10};
  before.info.mutable_load()->set_train_tokens(1000);
  before.info.mutable_load()->set_sampled_tokens(50);
  *before.adapters.add_adapters() = Used("a", 4, 1);
  LoadSample now{.seconds = 12};
  now.info.mutable_load()->set_train_tokens(1500);
  now.info.mutable_load()->set_sampled_tokens(7);  // The server restarted.
  *now.adapters.add_adapters() = Used("a", 9, 2);
  *now.adapters.add_adapters() = Used("b", 3, 3);
  const std::string table = LoadTable(before, now, /*max_adapters=*/5);
  EXPECT_THAT(table, HasSubstr("trained tokens/s   250.0\n"));
  EXPECT_THAT(table, HasSubstr("sampled tokens/s   -\n"));
  EXPECT_THAT(table, HasSubstr("a        t       9     2.5"));
  EXPECT_THAT(table, HasSubstr("b        t       3     -"));
  // The adapter that was used last comes first.
  EXPECT_LT(table.find("\nb "), table.find("\na "));
}

TEST(LoadTableTest, LeavesOutWhatTheServerDoesNotTellAndManyAdapters) {
  LoadSample now;
  for (const char* id : {"a", "b", "c"}) {
    *now.adapters.add_adapters() = Used(id, 1, 1);
  }
  const std::string table = LoadTable(std::nullopt, now, /*max_adapters=*/2);
  EXPECT_THAT(table, testing::StartsWith("ADAPTER"));
  EXPECT_THAT(table, testing::EndsWith("and 1 more\n"));
}

}  // namespace
}  // namespace weft::weftctl
