#include "src/base/log.h"

#include <string>

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

}  // namespace
}  // namespace weft
