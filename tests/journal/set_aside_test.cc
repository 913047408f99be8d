#include "src/log/set_aside.h"

#include "absl/strings/str_cat.h"
#include "src/log/backup.h"
#include "tests/journal/journal_folder.h"
#include "tests/support/failpoints.h"

namespace weft::journal {
namespace {

class SetAsideTest : public testing::Test {
 protected:
  SetAsideTest() {
    EXPECT_THAT(folder_->WriteSnapshot({.next_sequence = 1, .bytes = "all"}),
                IsOk());
    TestLog log(*folder_, 1);
    log->Append("record");
    log.Flush();
    for (const char* const image : {"a", "b"}) Write(image, image);
  }

  void Write(const std::string& image, const std::string& bytes) const {
    WriteBytes(files_.path() + "/images/" + image, bytes);
  }
  [[nodiscard]] std::string Aside(const std::string& name) const {
    return files_.path() + "/set-aside/x/" + name;
  }

  TestFolder files_;
  std::unique_ptr<StateFolder> folder_ = files_.Open();
};

TEST_F(SetAsideTest, KeepsFilesThatTheStateRemoves) {
  ASSERT_THAT(SetAside(*folder_, "x", {"a", "missing"}), IsOk());
  const std::string segment = ReadBytes(files_.Segment(1));
  ASSERT_THAT(folder_->WriteSnapshot({.next_sequence = 2, .bytes = "new"}),
              IsOk());
  { TestLog log(*folder_, 2); }
  ASSERT_THAT(folder_->Cut(2, {}), IsOk());
  EXPECT_FALSE(std::filesystem::exists(files_.Segment(1)));
  EXPECT_EQ(ReadBytes(Aside("log/" + StateFolder::SegmentName(1))), segment);
  EXPECT_EQ(ReadBytes(Aside("images/a")), "a");
  EXPECT_FALSE(std::filesystem::exists(Aside("images/b")));
  EXPECT_THAT(ReadBytes(Aside(StateFolder::SnapshotName(1))),
              testing::HasSubstr("all"));
  EXPECT_EQ(ReadBytes(Aside("FORMAT")), ReadBytes(files_.path() + "/FORMAT"));
}

TEST_F(SetAsideTest, ReplacesNothingAndStaysInItsFolder) {
  ASSERT_THAT(SetAside(*folder_, "x", {}), IsOk());
  ASSERT_THAT(SetAside(*folder_, "y", {}), IsOk());
  EXPECT_THAT(SetAside(*folder_, "x", {}),
              IsStatus(absl::StatusCode::kAlreadyExists, "x"));
  EXPECT_THAT(SetAside(*folder_, "../x", {}),
              IsStatus(absl::StatusCode::kInvalidArgument, ""));
}

TEST_F(SetAsideTest, ABackupLeavesItOut) {
  ASSERT_THAT(SetAside(*folder_, "x", {"a"}), IsOk());
  const std::string copy = files_.path() + ".copy";
  ASSERT_THAT(BackUp(files_.path(), copy), IsOk());
  EXPECT_FALSE(std::filesystem::exists(copy + "/set-aside"));
  EXPECT_EQ(ReadBytes(copy + "/images/a"), "a");
}

TEST_F(SetAsideTest, EveryOperationThatFailsIsAnError) {
  for (const char* const point : {"journal.make_aside", "journal.link_aside"}) {
    const ScopedFailpoints fail(absl::StrCat(point, "=err(EIO)"));
    EXPECT_THAT(SetAside(*folder_, "x", {"a"}),
                IsStatus(absl::StatusCode::kInternal, ""))
        << point;
    std::filesystem::remove_all(files_.path() + "/set-aside");
  }
}

}  // namespace
}  // namespace weft::journal
