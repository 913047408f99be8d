#include "src/base/observe/progress.h"

#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/base/observe/log.h"

namespace weft {
namespace {

TEST(ProgressTest, ShowsBarRateAndTimeLeft) {
  EXPECT_EQ(Progress::Format("load", 250'000'000, 1'000'000'000, "B",
                             absl::Seconds(2), /*bar_width=*/8),
            "load [##......]  25% 250.00 MB 125.00 MB/s eta 6s");
}

TEST(ProgressTest, ShowsTheTotalTimeAtTheEnd) {
  EXPECT_EQ(Progress::Format("load", 10, 10, "tensors", absl::Seconds(4),
                             /*bar_width=*/0),
            "load 100% 10 tensors 2 tensors/s in 4.0s");
}

TEST(ProgressTest, NeedsNoTotal) {
  EXPECT_EQ(Progress::Format("scan", 900, 0, "B", absl::Seconds(1), 8),
            "scan 900 B 900 B/s in 1.0s");
}

TEST(ProgressTest, StaysWithinTheBarWhateverTheCaller) {
  EXPECT_THAT(Progress::Format("x", 30, 10, "files", absl::ZeroDuration(), 4),
              testing::StartsWith("x [####] 100% 30 files"));
}

TEST(ProgressTest, AddsUpOverThreads) {
  testing::internal::CaptureStderr();
  {
    Progress progress("count", 200, "files");
    std::thread other([&] {
      for (int i = 0; i < 100; ++i) progress.Add(1);
    });
    for (int i = 0; i < 100; ++i) progress.Add(1);
    other.join();
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::HasSubstr("100% 200 files"));
}

TEST(ProgressTest, IsALineOfTheLogWithoutATerminal) {
  SetLogFormat(LogFormat::kJson);
  testing::internal::CaptureStderr();
  Progress("count", 1, "files").Add(1);
  const std::string output = testing::internal::GetCapturedStderr();
  SetLogFormat(LogFormat::kText);
  EXPECT_THAT(output, testing::StartsWith("{\"ts\":"));
  EXPECT_THAT(output, testing::HasSubstr("\"msg\":\"count 100% 1 files"));
}

}  // namespace
}  // namespace weft
