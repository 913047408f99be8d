#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "src/engine/recovery/snapshotter.h"

namespace weft::engine {
namespace {

constexpr uint64_t kGigabyte = 1'000'000'000;  // Takes 5 s to write.

TEST(LastSnapshotTest, IsWrittenIfTheReplayWouldTakeLonger) {
  EXPECT_TRUE(WorthLastSnapshot(absl::Seconds(1), kGigabyte / 10));
  EXPECT_FALSE(WorthLastSnapshot(absl::Seconds(1), kGigabyte));
  EXPECT_FALSE(WorthLastSnapshot(absl::ZeroDuration(), 0));
}

TEST(LastSnapshotTest, SparesTheNextStartALongReplay) {
  // This is the state of a hundred adapters of rank 16 on SmolLM2 after a step
  // or two of each.
  EXPECT_TRUE(WorthLastSnapshot(absl::Seconds(20), 6 * kGigabyte));
  EXPECT_FALSE(WorthLastSnapshot(absl::Seconds(4), 6 * kGigabyte));
}

TEST(LastSnapshotTest, IsNotWrittenBeyondTheSupervisorsPatience) {
  EXPECT_FALSE(WorthLastSnapshot(absl::Seconds(20), 10 * kGigabyte));
  EXPECT_TRUE(WorthLastSnapshot(absl::Seconds(51), 10 * kGigabyte));
}

// To a store of 20 MB/s six gigabytes take five minutes.
TEST(LastSnapshotTest, KnowsHowFastTheStoreIs) {
  EXPECT_FALSE(WorthLastSnapshot(absl::Seconds(20), 6 * kGigabyte, 20e6));
  EXPECT_TRUE(WorthLastSnapshot(absl::Seconds(20), 6 * kGigabyte, 300e6));
}

}  // namespace
}  // namespace weft::engine
