#include "src/base/observe/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

constexpr char kTime[] = "2026-01-02T03:04:05Z";

TEST(LogTest, WritesTextWithQuotesWhereNeeded) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, LogLevel::kInfo, kTime, "started",
                          {{"id", "a1"},
                           {"name", "two words"},
                           {"empty", ""},
                           {"rank", 16},
                           {"share", 0.5},
                           {"on", true}}),
            "2026-01-02T03:04:05Z info started id=a1 name=\"two words\" "
            "empty=\"\" rank=16 share=0.5 on=true");
}

TEST(LogTest, WritesJsonWithTypedValues) {
  EXPECT_EQ(FormatLogLine(LogFormat::kJson, LogLevel::kError, kTime, "failed",
                          {{"id", "7"}, {"rank", 16}, {"on", false}}),
            R"({"ts":"2026-01-02T03:04:05Z","level":"error","msg":"failed",)"
            R"("id":"7","rank":16,"on":false})");
}

TEST(LogTest, AClientsTextCannotForgeALine) {
  const std::string evil = "x\n2026 info fake\r\t\"\\\x7f\x1b[31m";
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    const std::string line =
        FormatLogLine(format, LogLevel::kWarning, kTime, evil, {{"id", evil}});
    for (const char c : line) {
      EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f) << line;
    }
    EXPECT_THAT(line, testing::HasSubstr("\\u000a2026 info fake"));
    EXPECT_THAT(line, testing::HasSubstr("\\\"\\\\"));
  }
}

TEST(LogTest, EscapesWhatATerminalObeysAndWhatIsNotUtf8) {
  const auto escaped = [](const std::string& text) {
    const std::string line = FormatLogLine(LogFormat::kJson, LogLevel::kInfo,
                                           "2026", "m", {{"name", text}});
    const std::string begin =
        R"({"ts":"2026","level":"info","msg":"m","name":")";
    EXPECT_EQ(line.substr(0, begin.size()), begin);
    return line.substr(begin.size(), line.size() - begin.size() - 2);
  };
  EXPECT_EQ(escaped("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  // A control sequence, DEL, line and paragraph separators, and directions.
  EXPECT_EQ(escaped("\xc2\x9b\x31m\x7f"), R"(\u009b1m\u007f)");
  EXPECT_EQ(escaped("\xe2\x80\xa8\xe2\x80\xa9"), R"(\u2028\u2029)");
  EXPECT_EQ(escaped("\xe2\x80\xae\xe2\x81\xa6\xd8\x9c"),
            R"(\u202e\u2066\u061c)");
  // A lone byte, a character cut short, an overlong one, a surrogate.
  EXPECT_EQ(escaped("\xff"), R"(\\xff)");
  EXPECT_EQ(escaped("\xe2\x82"), R"(\\xe2\\x82)");
  EXPECT_EQ(escaped("\xc0\x80"), R"(\\xc0\\x80)");
  EXPECT_EQ(escaped("\xed\xa0\x80"), R"(\\xed\\xa0\\x80)");
}

TEST(LogTest, LeavesOutWhatIsBelowTheLevel) {
  SetLogLevel(LogLevel::kWarning);
  testing::internal::CaptureStderr();
  Log(LogLevel::kInfo, "quiet");
  Log(LogLevel::kWarning, "loud", {{"n", 1}});
  const std::string output = testing::internal::GetCapturedStderr();
  SetLogLevel(LogLevel::kInfo);
  EXPECT_THAT(output, testing::EndsWith("Z warning loud n=1\n"));
  EXPECT_THAT(output, testing::Not(testing::HasSubstr("quiet")));
}

// Runs in a process of its own, because the log's thread never ends.
TEST(LogThreadDeathTest, AReaderThatStopsBlocksNobody) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        int ends[2] = {};
        if (pipe(ends) != 0) std::_Exit(2);
        const int told = dup(STDERR_FILENO);
        dup2(ends[1], STDERR_FILENO);
        StartLogThread();
        // The pipe, a batch that is being written and a batch that waits take
        // at most 2.1 MiB, which are 2,200 of these lines.
        const std::string text(1000, 'x');
        for (int i = 0; i < 5000; ++i) Log(LogLevel::kInfo, text);
        FlushLog(absl::Milliseconds(100));
        const uint64_t dropped = NumDroppedLogLines();
        std::thread([&] {
          for (char buffer[4096]; read(ends[0], buffer, sizeof(buffer)) > 0;) {
          }
        }).detach();
        FlushLog(absl::Seconds(30));
        dup2(told, STDERR_FILENO);
        Log(LogLevel::kInfo, dropped > 2500 ? "dropped" : "kept");
        FlushLog(absl::Seconds(30));
        std::_Exit(0);
      },
      testing::ExitedWithCode(0), "info dropped");
}

TEST(LogThreadDeathTest, LinesThatCannotBeWrittenAreCounted) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const int told = dup(STDERR_FILENO);
        dup2(open("/dev/full", O_WRONLY), STDERR_FILENO);
        Log(LogLevel::kInfo, "without a thread");
        StartLogThread();
        for (int i = 0; i < 2; ++i) {
          Log(LogLevel::kInfo, "x");
          FlushLog(absl::Seconds(30));
        }
        const uint64_t dropped = NumDroppedLogLines();
        dup2(told, STDERR_FILENO);
        Log(LogLevel::kInfo, "the disk has room");
        FlushLog(absl::Seconds(30));
        std::_Exit(dropped == 3 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "room\n.* log lines were dropped lines=3");
}

}  // namespace
}  // namespace weft
