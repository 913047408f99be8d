#include "src/base/files/spill_folder.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft {
namespace {

using enum absl::StatusCode;
namespace fs = std::filesystem;

class SpillFolderTest : public ::testing::Test {
 protected:
  SpillFolder Open() { return SpillFolder::Open(root_).value(); }

  const TempFolder folder_;
  const fs::path root_ = fs::path(folder_.path()) / "spill";
  const std::vector<float> first_ = {1.5f, -2, 0};
  const std::vector<float> second_ = {7};
};

TEST_F(SpillFolderTest, GivesBackWhatWasWritten) {
  const SpillFolder folder = Open();
  ASSERT_THAT(folder.Write("5", {first_, second_}), IsOk());
  std::vector<float> a(3);
  std::vector<float> b(1);
  ASSERT_THAT(folder.Read("5", {a, b}), IsOk());
  EXPECT_EQ(a, first_);
  EXPECT_EQ(b, second_);
  EXPECT_EQ(fs::file_size(root_ / "0" / "5"), 16u);
  EXPECT_THAT(folder.Remove("5"), IsOk());
  EXPECT_THAT(folder.Read("5", {a, b}), IsStatus(kNotFound, "opening 5"));
  EXPECT_THAT(folder.Remove("5"), IsStatus(kNotFound, "removing 5"));
}

TEST_F(SpillFolderTest, LeavesTheFoldersOfOthersAlone) {
  const fs::path target = fs::path(folder_.path()) / "target";
  fs::create_directory(target);
  fs::create_directory_symlink(target, root_);
  EXPECT_THAT(SpillFolder::Open(root_).status(),
              IsStatus(kFailedPrecondition, "no link"));
  EXPECT_TRUE(fs::is_empty(target));
  if (geteuid() != 0) return;
  fs::remove(root_);
  fs::create_directory(root_);
  ASSERT_EQ(chown(root_.c_str(), 1, 1), 0);
  EXPECT_THAT(SpillFolder::Open(root_).status(),
              IsStatus(kFailedPrecondition, "this process' user"));
}

TEST_F(SpillFolderTest, TellsOfAFileThatWasCutShort) {
  const SpillFolder folder = Open();
  ASSERT_THAT(folder.Write("5", {first_}), IsOk());
  fs::resize_file(root_ / "0" / "5", 11);
  std::vector<float> a(3);
  EXPECT_THAT(folder.Read("5", {a}), IsStatus(kDataLoss, "5 was cut short"));
}

TEST_F(SpillFolderTest, AFailedWriteLeavesNothing) {
  const SpillFolder folder = Open();
  ASSERT_EQ(symlink("/dev/full", (root_ / "0" / "5").c_str()), 0);
  // A write never follows a symbolic link that has the file's name.
  EXPECT_THAT(folder.Write("5", {first_}), IsStatus(kAlreadyExists, "5"));
  fs::remove_all(root_ / "0");
  EXPECT_THAT(folder.Write("6", {first_}), IsStatus(kNotFound, "creating 6"));
}

TEST_F(SpillFolderTest, IsRemovedAtTheEnd) {
  {
    const SpillFolder folder = Open();
    ASSERT_THAT(folder.Write("5", {first_}), IsOk());
  }
  EXPECT_TRUE(fs::is_empty(root_));
}

TEST_F(SpillFolderTest, RemovesWhatACrashedProcessLeft) {
  fs::create_directories(root_ / "0");
  fs::create_directories(root_ / "3");
  std::ofstream(root_ / "0" / "5") << "old";
  std::ofstream(root_ / "3" / "6") << "old";
  const SpillFolder folder = Open();
  EXPECT_TRUE(fs::is_empty(root_ / "0"));
  EXPECT_FALSE(fs::exists(root_ / "3"));
}

TEST_F(SpillFolderTest, LeavesAloneWhatAnotherProcessUses) {
  std::optional<SpillFolder> other = Open();
  ASSERT_THAT(other->Write("5", {first_}), IsOk());
  const SpillFolder folder = Open();
  ASSERT_THAT(folder.Write("5", {second_}), IsOk());
  std::vector<float> a(3);
  ASSERT_THAT(other->Read("5", {a}), IsOk());
  EXPECT_EQ(a, first_);
  other.reset();
  EXPECT_FALSE(fs::exists(root_ / "0"));
  EXPECT_TRUE(fs::exists(root_ / "1" / "5"));
}

TEST_F(SpillFolderTest, NeedsTheParent) {
  EXPECT_THAT(SpillFolder::Open(root_ / "missing").status(),
              IsStatus(kNotFound, "spill folder"));
}

}  // namespace
}  // namespace weft
