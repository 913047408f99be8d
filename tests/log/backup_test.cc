#include "src/log/folder/backup.h"

#include "tests/log/journal_folder.h"
#include "tests/support/failpoints.h"

namespace weft::log {
namespace {

namespace fs = std::filesystem;

class BackUpTest : public testing::Test {
 protected:
  BackUpTest() {
    EXPECT_THAT(folder_->WriteSnapshot({.next_sequence = 1, .bytes = "all"}),
                IsOk());
  }

  TestFolder files_;
  std::unique_ptr<StateFolder> folder_ = files_.Open();
  const std::string copy_ = files_.path() + ".copy";
};

// Each attempt copies FORMAT and then the snapshot, so the second copy is the
// snapshot's.
TEST_F(BackUpTest, TriesAgainIfTheSnapshotWasRemovedBeforeItsCopy) {
  const ScopedFailpoints fail("journal.copy=err(ENOENT)#2");
  ASSERT_THAT(BackUp(files_.path(), copy_), IsOk());
  EXPECT_EQ(FailpointHits("journal.copy"), 4);
  EXPECT_EQ(ReadBytes(copy_ + "/" + StateFolder::SnapshotName(1)),
            ReadBytes(files_.path() + "/" + StateFolder::SnapshotName(1)));
}

TEST_F(BackUpTest, DoesNotTryAgainIfTheSnapshotCannotBeRead) {
  const ScopedFailpoints fail("journal.copy=err(EIO)#2");
  EXPECT_THAT(BackUp(files_.path(), copy_),
              IsStatus(absl::StatusCode::kInternal, "SNAPSHOT-"));
  EXPECT_EQ(FailpointHits("journal.copy"), 2);
  EXPECT_FALSE(fs::exists(copy_ + ".partial"));
}

// BackUp syncs three folders (log, images and the copy) before it renames the
// copy.
TEST_F(BackUpTest, SyncsTheParentFolderAfterTheRename) {
  const ScopedFailpoints fail("files.sync_folder=err(EIO)#4");
  EXPECT_THAT(
      BackUp(files_.path(), copy_),
      IsStatus(absl::StatusCode::kInternal,
               "syncing " + fs::path(copy_).parent_path().string() + ": "));
  EXPECT_TRUE(fs::exists(copy_));
  EXPECT_FALSE(fs::exists(copy_ + ".partial"));
}

TEST_F(BackUpTest, MakesACopyWhosePathEndsInASlash) {
  ASSERT_THAT(BackUp(files_.path(), copy_ + "//"), IsOk());
  EXPECT_TRUE(fs::exists(copy_ + "/FORMAT"));
  EXPECT_FALSE(fs::exists(copy_ + "/.partial"));
}

TEST_F(BackUpTest, ACopyIsNotWithinItsFolder) {
  const std::string link = copy_ + ".link";
  fs::create_directory_symlink(files_.path(), link);
  for (const std::string& folder : {files_.path(), link}) {
    EXPECT_THAT(BackUp(files_.path() + "/", folder + "/sub"),
                IsStatus(absl::StatusCode::kInvalidArgument,
                         folder + "/sub is within " + files_.path()));
  }
  fs::remove(link);
  EXPECT_FALSE(fs::exists(files_.path() + "/sub.partial"));
}

TEST_F(BackUpTest, MakesACopyInTheCurrentFolder) {
  const fs::path before = fs::current_path();
  fs::current_path(fs::path(copy_).parent_path());
  EXPECT_THAT(BackUp(files_.path(), fs::path(copy_).filename()), IsOk());
  fs::current_path(before);
  EXPECT_TRUE(fs::exists(copy_ + "/FORMAT"));
}

}  // namespace
}  // namespace weft::log
