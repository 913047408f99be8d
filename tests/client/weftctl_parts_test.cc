// Tests the parts of weftctl that need no server.
#include <sstream>

#include "client/weftctl/arguments.h"
#include "client/weftctl/output.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft::client::weftctl {
namespace {

using ::testing::HasSubstr;

const std::vector<FlagSpec> kFlags = {
    {"rank", "R", "", "32"},           {"lr", "RATE", "", "1e-4"},
    {"timeout", "D", "", "10m"},       {"prompt", "IDS", "", ""},
    {"output", "FORMAT", "", "table"}, {"stream", "", "", ""}};

absl::StatusOr<Arguments> Parse(const std::vector<std::string>& given) {
  return Arguments::Parse(given, kFlags, {"ADAPTER", "NAME"}, true);
}

TEST(OutputTest, NoNameOrErrorControlsTheTerminal) {
  EXPECT_EQ(Printable("poet-1 \u00fc\u4e2d\U0001f600"),
            "poet-1 \u00fc\u4e2d\U0001f600");
  EXPECT_EQ(Printable("\x1b[2J\n\r\t\x7f"),
            "\\u001b[2J\\u000a\\u000d\\u0009\\u007f");
  EXPECT_EQ(Printable("\u0085\u061c\u200e\u2028\u202e\u2066"),
            "\\u0085\\u061c\\u200e\\u2028\\u202e\\u2066");
  // Bytes that are not UTF-8: alone, too long a form, a surrogate, cut off.
  EXPECT_EQ(Printable("\x9b\xc0\x9b\xed\xa0\x80\xe2\x80"),
            "\\x9b\\xc0\\x9b\\xed\\xa0\\x80\\xe2\\x80");
  std::ostringstream out;
  PrintTable({{"a\nb", "c"}}, out);
  EXPECT_EQ(out.str(), "a\\u000ab  c\n");
}

TEST(ArgumentsTest, TakesFlagsBetweenWords) {
  const auto arguments =
      Parse({"--rank", "4", "a", "--lr=0.5", "--stream", "b", "-o", "json"})
          .value();
  EXPECT_EQ(arguments.word(0), "a");
  EXPECT_EQ(arguments.word(1), "b");
  EXPECT_EQ(*arguments.GetInt("rank"), 4);
  EXPECT_EQ(*arguments.GetDouble("lr"), 0.5);
  EXPECT_TRUE(arguments.Has("stream"));
  EXPECT_EQ(arguments.GetString("output"), "json");
}

TEST(ArgumentsTest, FallsBackToDefaults) {
  const auto arguments = Parse({"a"}).value();
  EXPECT_EQ(*arguments.GetInt("rank"), 32);
  EXPECT_EQ(*arguments.GetDuration("timeout"), absl::Minutes(10));
  EXPECT_TRUE(arguments.GetTokens("prompt")->empty());
  EXPECT_EQ(arguments.word(1), "");
}

TEST(ArgumentsTest, NamesTheFlagOfABadValue) {
  const auto arguments =
      Parse({"a", "--rank=many", "--lr=x", "--timeout=2", "--prompt=1,-2"})
          .value();
  for (const absl::Status& status :
       {arguments.GetInt("rank").status(), arguments.GetDouble("lr").status(),
        arguments.GetDuration("timeout").status(),
        arguments.GetTokens("prompt").status()}) {
    EXPECT_TRUE(IsUsageError(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--"));
  }
}

TEST(ArgumentsTest, RefusesNumbersOutOfRange) {
  const auto given = Parse({"a", "--rank=4294967295", "--timeout=0s"}).value();
  EXPECT_EQ(*given.GetUint32("rank"), 4294967295);
  EXPECT_EQ(given.GetDuration("timeout").status().message(),
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

TEST(DescribeStateTest, SaysWhatARestartHasNotRestored) {
  v1::ServerInfo info;
  EXPECT_EQ(DescribeState(info), "starting");
  info.mutable_model()->set_architecture("llama");
  EXPECT_EQ(DescribeState(info), "serving");
  info.set_num_adapters(5);
  info.set_num_restoring(3);
  EXPECT_EQ(DescribeState(info), "restoring 3 of 5 adapters");
  info.set_restore_seconds(79.6);
  EXPECT_EQ(DescribeState(info), "restoring 3 of 5 adapters, about 80 s left");
}

}  // namespace
}  // namespace weft::client::weftctl
