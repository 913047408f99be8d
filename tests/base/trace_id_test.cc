#include "src/base/trace_id.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/base/observe/log.h"
#include "src/base/threads/worker.h"

namespace weft {
namespace {

constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr char kParent[] =
    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TraceId Id(const std::string& text) {
  return std::make_shared<const std::string>(text);
}

TEST(TraceIdTest, TakesTheIdOfAValidTraceparentFirst) {
  EXPECT_EQ(*MakeTraceId(kParent, "mine"), kTrace);
  // A traceparent of a later version than 0 may have more fields.
  EXPECT_EQ(*MakeTraceId("cc" + std::string(kParent).substr(2) + "-x", ""),
            kTrace);
}

TEST(TraceIdTest, LeavesOutATraceparentThatIsNotValid) {
  std::string parent = kParent;
  const std::string bad[] = {
      "",
      parent.substr(1),
      parent + "-x",                                     // Extra field.
      "ff" + parent.substr(2),                           // Reserved.
      "00-" + std::string(32, '0') + parent.substr(35),  // All zero.
      parent.substr(0, 36) + std::string(16, '0') + parent.substr(52),
      "00-4BF92F3577B34DA6A3CE929D0E0E4736" + parent.substr(35),  // Capitals.
      parent.substr(0, 53) + "0g"};
  for (const std::string& header : bad) {
    EXPECT_EQ(*MakeTraceId(header, "mine"), "mine") << header;
  }
}

TEST(TraceIdTest, MakesAnIdWhereTheRequestHasNoneThatIsFitForALog) {
  for (const std::string& request :
       {std::string(), std::string("a b"), std::string("a\nb"),
        std::string("a=b"), std::string("\xc3\xa9"), std::string(65, 'a')}) {
    const std::string id = *MakeTraceId("", request);
    EXPECT_THAT(id, testing::MatchesRegex("[0-9a-f]+"));
    EXPECT_EQ(id.size(), 32u);
  }
  EXPECT_NE(*MakeTraceId("", ""), *MakeTraceId("", ""));
  EXPECT_EQ(*MakeTraceId("", "Run-7_a.b"), "Run-7_a.b");
}

TEST(TraceIdTest, LogLinesInAScopeHaveTheId) {
  const auto line = [](LogFormat format) {
    return FormatLogLine(format, LogLevel::kInfo, "t", "m", {{"n", 1}});
  };
  EXPECT_EQ(line(LogFormat::kText), "t info m n=1");
  const TraceScope outer(Id("outer"));
  {
    const TraceScope inner(Id("inner"));
    EXPECT_EQ(line(LogFormat::kText), "t info m n=1 trace_id=inner");
  }
  EXPECT_EQ(line(LogFormat::kJson),
            R"({"ts":"t","level":"info","msg":"m","n":1,"trace_id":"outer"})");
}

TEST(TraceIdTest, APostedTaskRunsWithTheIdOfItsPoster) {
  TraceId seen = Id("not run");
  TraceId after = Id("not run");
  {
    Worker worker;
    {
      const TraceScope scope(Id("poster"));
      worker.Post([&] { seen = CurrentTrace(); });
    }
    worker.Post([&] { after = CurrentTrace(); });
  }
  ASSERT_NE(seen, nullptr);
  EXPECT_EQ(*seen, "poster");
  EXPECT_EQ(after, nullptr);
}

TEST(TraceIdTest, WorkOfSeveralRequestsHasAllTheirIds) {
  EXPECT_EQ(JoinTraces({}), nullptr);
  EXPECT_EQ(JoinTraces({nullptr}), nullptr);
  EXPECT_EQ(*JoinTraces({Id("a"), nullptr, Id("a")}), "a");
  EXPECT_EQ(*JoinTraces({Id("a"), Id("b"), Id("a")}), "a,b");
  std::vector<TraceId> many;
  for (int i = 0; i < 20; ++i) many.push_back(Id(std::to_string(i)));
  EXPECT_EQ(*JoinTraces(many), "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,+4");
}

}  // namespace
}  // namespace weft
