#include "src/log/restore_points.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft::records {
namespace {

constexpr AdapterKey kA{1}, kB{2};

class RestorePointsTest : public testing::Test {
 protected:
  RestorePointsTest() {
    EXPECT_TRUE(points_.Follow(StoredAdapter{
        .key = kA, .adapter_id = "a", .tenant = "t", .from_checkpoint = true}));
    EXPECT_FALSE(points_.Follow(StoredAdapter{.key = kB, .adapter_id = "b"}));
  }

  static DoneRecord Saved(AdapterKey key, const std::string& name,
                          CheckpointKind kind) {
    return {.key = key,
            .step = 1,
            .digest = "",
            .request = {},
            .result = CheckpointInfo{.name = name, .kind = kind}};
  }
  [[nodiscard]] std::optional<LoadCheckpointRequest> Restore() const {
    return points_.adapters().at(kA).restore;
  }

  RestorePoints points_;
};

TEST_F(RestorePointsTest, TheLatestSaveOrLoadCounts) {
  EXPECT_FALSE(Restore().has_value());
  EXPECT_TRUE(points_.Follow(Saved(kA, "one", CheckpointKind::kTrain)));
  // A sampler's checkpoint cannot bring the adapter back.
  EXPECT_TRUE(points_.Follow(Saved(kA, "small", CheckpointKind::kSampler)));
  ASSERT_TRUE(Restore().has_value());
  EXPECT_EQ(Restore()->adapter_id, "a");
  EXPECT_EQ(Restore()->source_adapter_id, "a");
  EXPECT_EQ(Restore()->name, "one");
  EXPECT_EQ(Restore()->tenant, "t");
  EXPECT_EQ(Restore()->durability, Durability::kCheckpoint);
  EXPECT_TRUE(points_.Follow(
      LoadedRecord{.key = kA,
                   .step = 7,
                   .digest = "",
                   .request = LoadCheckpointRequest{.adapter_id = "a",
                                                    .source_adapter_id = "x",
                                                    .name = "theirs",
                                                    .weights_only = true,
                                                    .step = 7},
                   .file = ""}));
  EXPECT_EQ(Restore()->source_adapter_id, "x");
  EXPECT_TRUE(Restore()->weights_only);
  EXPECT_EQ(Restore()->step, 0);
  EXPECT_EQ(Restore()->tenant, "t");
}

TEST_F(RestorePointsTest, ARestoredAdapterIsRestoredAgain) {
  const StoredAdapter made{
      .key = kA,
      .adapter_id = "a",
      .from_checkpoint = true,
      .restore = LoadCheckpointRequest{.adapter_id = "a", .name = "one"}};
  const absl::StatusOr<Record> logged = DecodeRecord(Encode(made));
  ASSERT_TRUE(logged.ok());
  EXPECT_TRUE(points_.Follow(*logged));
  EXPECT_EQ(Restore()->name, "one");
  EXPECT_EQ(Restore()->durability, Durability::kCheckpoint);
}

TEST_F(RestorePointsTest, OtherAdaptersAreNotFollowed) {
  EXPECT_FALSE(points_.Follow(Saved(kB, "one", CheckpointKind::kTrain)));
  EXPECT_FALSE(points_.Follow(GivenUpRecord{.work = 1}));
  EXPECT_FALSE(points_.contains(kB));
}

TEST_F(RestorePointsTest, ARemovedAdapterIsForgotten) {
  EXPECT_TRUE(points_.Follow(RemovedRecord{.key = kA}));
  EXPECT_FALSE(points_.contains(kA));
}

}  // namespace
}  // namespace weft::records
