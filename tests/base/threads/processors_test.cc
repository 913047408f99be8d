#include "src/base/threads/processors.h"

#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "gtest/gtest.h"
#include "src/base/clock.h"
#include "tests/support/temp_folder.h"

namespace weft {
namespace {

// Writes a kernel's table in which each of this process's processors, and one
// that is not its own, has been idle for `ticks`.
void WriteIdle(const std::string& root, int64_t ticks) {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  std::filesystem::create_directories(root + "/proc");
  std::ofstream file(root + "/proc/stat");
  file << "cpu  9 9 9 999 9 9 9 9 9 9\n";
  bool foreign = false;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    const bool own = CPU_ISSET(i, &allowed);
    if (!own && std::exchange(foreign, true)) continue;
    file << "cpu" << i << " 5 5 5 " << (own ? ticks : 7 * ticks)
         << " 0 5 5 5 0 0\n";
  }
  file << "intr 1 2 3\n";
}

class ProcessorShareTest : public ::testing::Test {
 protected:
  const TempFolder folder_;
  const std::string& root_ = folder_.path();
};

TEST_F(ProcessorShareTest, CountsIdleProcessorsThatItMayUse) {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  ProcessorShare share(root_);
  WriteIdle(root_, 0);
  const absl::Time start = SteadyNow();
  EXPECT_EQ(share.Look(), std::nullopt);
  absl::SleepFor(absl::Milliseconds(200));
  // Each of them was idle for half a second.
  WriteIdle(root_, sysconf(_SC_CLK_TCK) / 2);
  const std::optional<double> left = share.Look();
  const double seconds = absl::ToDoubleSeconds(SteadyNow() - start);
  ASSERT_TRUE(left.has_value());
  EXPECT_GE(*left, 0.5 * CPU_COUNT(&allowed) / seconds);
  EXPECT_LE(*left, 0.5 * CPU_COUNT(&allowed) / 0.2 + 1);
}

TEST_F(ProcessorShareTest, CountsWhatItUsesItself) {
  ProcessorShare share(root_);
  WriteIdle(root_, 100);
  EXPECT_EQ(share.Look(), std::nullopt);
  const clock_t start = clock();
  while (clock() - start < CLOCKS_PER_SEC / 10) {
  }
  const std::optional<double> left = share.Look();
  ASSERT_TRUE(left.has_value());
  EXPECT_GT(*left, 0);
  EXPECT_LE(*left, 1.1);
}

TEST_F(ProcessorShareTest, SaysNothingIfTheKernelDoesNot) {
  ProcessorShare share(root_);
  EXPECT_EQ(share.Look(), std::nullopt);
  EXPECT_EQ(share.Look(), std::nullopt);
}

}  // namespace
}  // namespace weft
