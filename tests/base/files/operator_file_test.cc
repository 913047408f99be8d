#include "src/base/files/operator_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

class OperatorFileTest : public ::testing::Test {
 protected:
  const TempFolder temporary_;
  const std::string folder_ = temporary_.path();
  const std::string path_ = folder_ + "/file";
};

TEST_F(OperatorFileTest, FollowsLinks) {
  std::ofstream(folder_ + "/target") << "contents";
  fs::create_symlink("target", path_);
  EXPECT_EQ(ReadOperatorFile(path_).value(), "contents");
}

TEST_F(OperatorFileTest, ReadsAPipeToItsEnd) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  const std::string contents(100'000, 'x');
  std::thread writer([&] { std::ofstream(path_) << contents; });
  EXPECT_EQ(ReadOperatorFile(path_).value(), contents);
  writer.join();
}

TEST_F(OperatorFileTest, RefusesWhatIsNoFileOrTooLarge) {
  EXPECT_THAT(ReadOperatorFile(path_),
              IsStatus(absl::StatusCode::kNotFound, "opening the file"));
  EXPECT_THAT(ReadOperatorFile(folder_),
              IsStatus(absl::StatusCode::kInternal, "Is a directory"));
  std::ofstream(path_) << "x";
  fs::resize_file(path_, 16 << 20);
  EXPECT_EQ(ReadOperatorFile(path_)->size(), size_t{16} << 20);
  fs::resize_file(path_, (16 << 20) + 1);
  EXPECT_THAT(ReadOperatorFile(path_),
              IsStatus(absl::StatusCode::kResourceExhausted, "16 MiB"));
}

TEST_F(OperatorFileTest, WarnsOfWhatOthersMayWrite) {
  std::ofstream(path_) << "x";
  for (const mode_t mode : {0600, 0660, 0602, 0777}) {
    ASSERT_EQ(chmod(path_.c_str(), mode), 0);
    ::testing::internal::CaptureStderr();
    WarnIfOthersMayWrite(path_);
    EXPECT_EQ(!::testing::internal::GetCapturedStderr().empty(),
              (mode & 2) != 0)
        << mode;
  }
  if (geteuid() != 0) return;
  ASSERT_EQ(chmod(path_.c_str(), 0600), 0);
  ASSERT_EQ(chown(path_.c_str(), 1, 1), 0);
  ::testing::internal::CaptureStderr();
  WarnIfOthersMayWrite(path_);
  EXPECT_NE(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace weft
