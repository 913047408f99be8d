#include "src/base/observe/profile.h"

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft::profile {
namespace {

TEST(ProfileTest, SpansNestAndEndInOrder) {
  Recording recording(10);
  {
    const Use use(&recording);
    const Span outer("outer");
    { const Span inner("inner", "layer", 3); }
  }
  ASSERT_EQ(recording.spans().size(), 2u);
  const SpanTimes& inner = recording.spans()[0];
  const SpanTimes& outer = recording.spans()[1];
  EXPECT_STREQ(inner.name, "inner");
  EXPECT_STREQ(outer.name, "outer");
  EXPECT_LE(outer.begin_ns, inner.begin_ns);
  EXPECT_LE(inner.begin_ns, inner.end_ns);
  EXPECT_LE(inner.end_ns, outer.end_ns);
}

TEST(ProfileTest, RecordsOnlyWhileItIsUsedAndOnlyItsThread) {
  Recording recording(10);
  { const Span before("before"); }
  {
    const Use use(&recording);
    std::thread([] { const Span other("other thread"); }).join();
  }
  { const Span after("after"); }
  EXPECT_TRUE(recording.spans().empty());
}

TEST(ProfileTest, ASpanThatBeganBeforeTheRecordingIsLeftOut) {
  Recording recording(10);
  const Span early("early");
  const Use use(&recording);
  { const Span late("late"); }
  EXPECT_EQ(recording.spans().size(), 1u);
}

TEST(ProfileTest, SpansBeyondTheLimitAreCounted) {
  Recording recording(2);
  const Use use(&recording);
  for (int i = 0; i < 5; ++i) const Span span("span");
  EXPECT_EQ(recording.spans().size(), 2u);
  EXPECT_EQ(recording.num_dropped(), 3u);
  EXPECT_THAT(ToChromeTrace(recording, "t"),
              testing::HasSubstr(R"("dropped_spans":3)"));
}

TEST(ProfileTest, WritesAChromeTrace) {
  Recording recording(10);
  {
    const Use use(&recording);
    const Span span("layer forward", "layer", 3);
  }
  EXPECT_THAT(
      ToChromeTrace(recording, "weft-engine"),
      testing::MatchesRegex(
          ".*\"traceEvents\":.\\{\"ph\":\"M\".*\"weft-engine\".*"
          "\\{\"ph\":\"X\",\"pid\":1,\"tid\":1,\"name\":\"layer forward\","
          "\"ts\":[0-9.]+,\"dur\":[0-9.]+,\"args\":\\{\"layer\":3\\}\\}.\\}"
          "\n"));
}

}  // namespace
}  // namespace weft::profile
