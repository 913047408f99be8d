#include "src/base/files/durable_folder.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "src/base/files/file_io.h"
#include "tests/support/failpoints.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;

class DurableFolderTest : public testing::Test {
 protected:
  fs::path File(const std::string& folder, const std::string& name) const {
    return fs::path(parent_) / folder / name;
  }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    const auto folders = ListDurableFolders(parent_).value();
    for (const ListedFolder& folder : folders) {
      names.push_back(folder.name);
    }
    return names;
  }

  static void Overwrite(const fs::path& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  const TempFolder temporary_;
  const std::string& parent_ = temporary_.path();
  const DurableFolder folder_{
      .files = {{"weights.bin", std::string("a\0b", 3)}, {"empty", ""}},
      .fields = {{"step", 7}}};
};

TEST_F(DurableFolderTest, ReadsWhatItWrote) {
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, false), IsOk());
  const auto read = ReadDurableFolder(parent_, "one").value();
  EXPECT_EQ(read.files, folder_.files);
  EXPECT_EQ(read.fields, folder_.fields);
  EXPECT_EQ(*ReadDurableFields(parent_, "one"), folder_.fields);
  EXPECT_THAT(Names(), ElementsAre("one"));
}

TEST_F(DurableFolderTest, AnOpenedFolderStaysReadableAfterItIsRemoved) {
  const std::string large(5 << 19, 'x');  // Two and a half pieces.
  ASSERT_THAT(
      WriteDurableFolder(
          parent_, "one",
          {.files = {{"large", large}, {"empty", ""}}, .fields = {}}, false),
      IsOk());
  const auto opened = OpenDurableFolder(parent_, "one").value();
  ASSERT_THAT(RemoveDurableFolder(parent_, "one"), IsOk());
  ASSERT_EQ(opened.files.size(), 2);
  const FileSource& file = opened.files[0];
  EXPECT_EQ(file.name(), "large");
  EXPECT_EQ(file.size(), large.size());
  EXPECT_EQ(*file.Read(large.size() - 3, 9), "xxx");
  EXPECT_EQ(*file.Read(0, file.size()), large);
  EXPECT_EQ(opened.files[1].size(), 0);
}

TEST_F(DurableFolderTest, AnOpenedFileIsWholeOnlyIfItIsRight) {
  ASSERT_THAT(
      WriteDurableFolder(parent_, "one",
                         {.files = {{"f", "abcd"}}, .fields = {}}, false),
      IsOk());
  const auto damaged = IsStatus(absl::StatusCode::kDataLoss,
                                "f of folder \"one\" has another SHA-256");
  auto opened = OpenDurableFolder(parent_, "one").value();
  for (int i = 0; i < 2; ++i) {  // It can be read again.
    EXPECT_THAT(opened.files[0].Read(0, 3), IsOkAndHolds("abc"));
    EXPECT_THAT(opened.files[0].Read(3, 9), IsOkAndHolds("d"));
    EXPECT_THAT(opened.files[0].Read(4, 9), IsOkAndHolds(""));
  }
  Overwrite(File("one", "f"), "axcd");
  opened = OpenDurableFolder(parent_, "one").value();
  EXPECT_THAT(opened.files[0].Read(0, 3), IsOkAndHolds("axc"));
  EXPECT_THAT(opened.files[0].Read(3, 9), damaged);
  EXPECT_THAT(opened.files[0].Read(0, 4), damaged);
  // Parts that do not follow one another are not checked.
  EXPECT_THAT(opened.files[0].Read(2, 9), IsOkAndHolds("cd"));
  Overwrite(File("one", "f"), "ab");
  EXPECT_THAT(opened.files[0].Read(0, 4),
              IsStatus(absl::StatusCode::kDataLoss, "has become shorter"));
}

TEST_F(DurableFolderTest, ReplacesAFolderOnlyWhenAskedTo) {
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, true), IsOk());
  const DurableFolder other{.files = {{"b", "2"}}, .fields = {{"step", 8}}};
  EXPECT_THAT(WriteDurableFolder(parent_, "one", other, false),
              IsStatus(absl::StatusCode::kAlreadyExists, "one"));
  EXPECT_EQ(ReadDurableFolder(parent_, "one")->files, folder_.files);
  ASSERT_THAT(WriteDurableFolder(parent_, "one", other, true), IsOk());
  EXPECT_EQ(ReadDurableFolder(parent_, "one")->files, other.files);
  // No temporary folder remains of the refused write or of the replacement.
  EXPECT_EQ(std::distance(fs::directory_iterator(parent_), {}), 1);
}

TEST_F(DurableFolderTest, ReadersSeeTheOldOrTheNewFolder) {
  const DurableFolder other{.files = {{"b", "2"}}, .fields = {{"step", 8}}};
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, false), IsOk());
  std::thread writer([&] {
    for (int i = 0; i < 20; ++i) {
      EXPECT_THAT(
          WriteDurableFolder(parent_, "one", i % 2 ? folder_ : other, true),
          IsOk());
    }
  });
  for (int i = 0; i < 200; ++i) {
    EXPECT_THAT(Names(), ElementsAre("one"));
  }
  writer.join();
  EXPECT_EQ(ReadDurableFolder(parent_, "one")->files, folder_.files);
}

TEST_F(DurableFolderTest, EveryErrorLeavesTheOldFolderOrTheNewOne) {
  const DurableFolder other{.files = {{"b", "2"}}, .fields = {{"step", 8}}};
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, false), IsOk());
  int operations = 0;
  for (bool failed = true; failed; ++operations) {
    SetFailpoints(absl::StrCat("files.*=err(ENOSPC)#", operations + 1));
    const absl::Status status = WriteDurableFolder(parent_, "one", other, true);
    SetFailpoints("");
    failed = !status.ok();
    if (failed) {
      EXPECT_THAT(status, IsStatus(absl::StatusCode::kResourceExhausted, ""));
    }
    EXPECT_THAT(ReadDurableFolder(parent_, "one")->files,
                testing::AnyOf(folder_.files, other.files));
    EXPECT_EQ(std::distance(fs::directory_iterator(parent_), {}), 1);
    ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, true), IsOk());
  }
  // 12 operations may fail: one creates a folder, four for each of two files
  // (create, write, sync and close), two syncs of folders, and one exchange of
  // two folders. In the last round nothing fails.
  EXPECT_EQ(operations, 13);
}

TEST_F(DurableFolderTest, EveryKillLeavesTheOldFolderOrTheNewOne) {
  const DurableFolder other{.files = {{"b", "2"}}, .fields = {{"step", 8}}};
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, false), IsOk());
  bool killed = true;
  for (int operation = 1; killed; ++operation) {
    const pid_t child = ::fork();
    if (child == 0) {
      SetFailpoints(absl::StrCat("files.*=kill#", operation));
      ::_exit(WriteDurableFolder(parent_, "one", other, true).ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    killed = WIFSIGNALED(status);
    ASSERT_TRUE(killed || status == 0);
    EXPECT_THAT(ReadDurableFolder(parent_, "one")->files,
                testing::AnyOf(folder_.files, other.files));
    EXPECT_THAT(RemoveStaleTemporaries(parent_), IsOk());
    EXPECT_EQ(std::distance(fs::directory_iterator(parent_), {}), 1);
    ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, true), IsOk());
  }
}

TEST_F(DurableFolderTest, FieldsAreReplacedWhereverItFailsCompletelyOrNot) {
  const nlohmann::json other = {{"step", 8}};
  int operations = 0;
  for (bool failed = true; failed; ++operations) {
    ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, true), IsOk());
    SetFailpoints(absl::StrCat("files.*=err(EIO)#", operations + 1));
    failed = !ReplaceDurableFields(parent_, "one", other).ok();
    SetFailpoints("");
    const auto read = ReadDurableFolder(parent_, "one").value();
    EXPECT_EQ(read.files, folder_.files);
    EXPECT_THAT(read.fields, testing::AnyOf(folder_.fields, other));
    if (!failed) {
      EXPECT_EQ(read.fields, other);
    }
    // The manifest and two files.
    EXPECT_EQ(
        std::distance(fs::directory_iterator(fs::path(parent_) / "one"), {}),
        3);
  }
  EXPECT_GT(operations, 3);
  EXPECT_THAT(ReplaceDurableFields(parent_, "two", other),
              IsStatus(absl::StatusCode::kNotFound, "two"));
}

TEST_F(DurableFolderTest, EveryErrorOfARemovalLeavesAllOrNothing) {
  int operations = 0;
  for (bool failed = true; failed; ++operations) {
    ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, true), IsOk());
    SetFailpoints(absl::StrCat("files.*=err(EIO)#", operations + 1));
    failed = !RemoveDurableFolder(parent_, "one").ok();
    SetFailpoints("");
    const auto read = ReadDurableFolder(parent_, "one");
    if (read.ok()) {
      EXPECT_EQ(read->files, folder_.files);
    }
    EXPECT_EQ(std::distance(fs::directory_iterator(parent_), {}), read.ok());
  }
  EXPECT_GT(operations, 2);
}

TEST_F(DurableFolderTest, NamesTheDamagedFile) {
  const auto damaged = [&](const std::string& file, const char* how) {
    const std::string message = file + " of folder \"one\" " + how;
    EXPECT_THAT(ReadDurableFolder(parent_, "one"),
                IsStatus(absl::StatusCode::kDataLoss, message));
    // A sum is checked when the file has been read.
    const auto opened = OpenDurableFolder(parent_, "one");
    absl::Status status = opened.status();
    for (size_t i = 0; status.ok() && i < opened->files.size(); ++i) {
      status = opened->files[i].Read(0, 100).status();
    }
    EXPECT_THAT(status, IsStatus(absl::StatusCode::kDataLoss, message));
    ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, true), IsOk());
  };
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, true), IsOk());
  Overwrite(File("one", "weights.bin"), "axb");
  damaged("weights.bin", "has another SHA-256");
  Overwrite(File("one", "weights.bin"), "ab");
  damaged("weights.bin", "has 2 bytes, not 3");
  fs::remove(File("one", "empty"));
  damaged("empty", "cannot be read");
  fs::remove(File("one", "empty"));
  fs::create_symlink("weights.bin", File("one", "empty"));
  damaged("empty", "cannot be read");
  fs::remove(File("one", "empty"));
  ASSERT_EQ(::mkfifo(File("one", "empty").c_str(), 0600), 0);
  damaged("empty", "cannot be read");
  fs::remove(File("one", "MANIFEST.json"));
  damaged("MANIFEST.json", "is missing");
  for (
      const char* text :
      {"", "[]", "{\"files\": 3}",
       R"({"format_version":2,"fields":{},"files":[]})",
       R"({"format_version":1,"fields":{},"files":[3]})",
       R"({"format_version":1,"fields":{},"files":[{"name":"a","size":-1,"sha256":""}]})"}) {
    Overwrite(File("one", "MANIFEST.json"), text);
    damaged("MANIFEST.json", "is damaged");
  }
  Overwrite(File("one", "MANIFEST.json"),
            R"({"format_version":1,"fields":{},"files":)"
            R"([{"name":"../x","size":1,"sha256":""}]})");
  damaged("../x", "cannot be read");
}

TEST_F(DurableFolderTest, RefusesNamesThatAreNotOnePartOfAPath) {
  for (const std::string name : {"", ".", "..", "a/b", "/etc", ".tmp-1-2"}) {
    EXPECT_THAT(WriteDurableFolder(parent_, name, folder_, false),
                IsStatus(absl::StatusCode::kInvalidArgument, ""));
    EXPECT_THAT(ReadDurableFolder(parent_, name),
                IsStatus(absl::StatusCode::kInvalidArgument, ""));
    EXPECT_THAT(RemoveDurableFolder(parent_, name),
                IsStatus(absl::StatusCode::kInvalidArgument, ""));
  }
  for (const std::string file : {"a/b", "..", "MANIFEST.json"}) {
    EXPECT_THAT(
        WriteDurableFolder(parent_, "one", {.files = {{file, ""}}}, false),
        IsStatus(absl::StatusCode::kInvalidArgument, ""));
  }
  EXPECT_TRUE(fs::is_empty(parent_));
}

TEST_F(DurableFolderTest, DoesNotFollowALinkToAFolder) {
  fs::create_directory_symlink("/", fs::path(parent_) / "link");
  EXPECT_THAT(ReadDurableFolder(parent_, "link"),
              IsStatus(absl::StatusCode::kNotFound, "link"));
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, false), IsOk());
  fs::create_directory_symlink(parent_, parent_ + "-link");
  EXPECT_THAT(ReadDurableFields(parent_ + "-link", "one"),
              IsStatus(absl::StatusCode::kNotFound, "one"));
  EXPECT_TRUE(ListDurableFolders(parent_ + "-link")->empty());
  fs::remove(parent_ + "-link");
  ASSERT_THAT(RemoveDurableFolder(parent_, "one"), IsOk());
  EXPECT_TRUE(ListDurableFolders(parent_)->empty());
}

TEST_F(DurableFolderTest, AFolderHasAnotherVersionAfterAChangeOfItsFields) {
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, false), IsOk());
  const std::string first = ListDurableFolders(parent_)->front().version;
  EXPECT_EQ(ListDurableFolders(parent_)->front().version, first);
  ASSERT_THAT(ReplaceDurableFields(parent_, "one", {{"step", 8}}), IsOk());
  EXPECT_NE(ListDurableFolders(parent_)->front().version, first);
}

TEST_F(DurableFolderTest, RemovesFoldersAndSaysWhatIsNotThere) {
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, false), IsOk());
  EXPECT_THAT(RemoveDurableFolder(parent_, "one"), IsOk());
  EXPECT_TRUE(fs::is_empty(parent_));
  EXPECT_THAT(RemoveDurableFolder(parent_, "one"),
              IsStatus(absl::StatusCode::kNotFound, "one"));
  EXPECT_THAT(ReadDurableFolder(parent_, "one"),
              IsStatus(absl::StatusCode::kNotFound, "one"));
  EXPECT_THAT(ReadDurableFields(parent_, "one"),
              IsStatus(absl::StatusCode::kNotFound, "one"));
  EXPECT_TRUE(ListDurableFolders(parent_ + "/none")->empty());
}

TEST_F(DurableFolderTest, ClearsWhatAnInterruptedWriteLeft) {
  fs::create_directory(fs::path(parent_) / ".tmp-9-9");
  Overwrite(File(".tmp-9-9", "MANIFEST.json"), "{}");
  ASSERT_THAT(WriteDurableFolder(parent_, "one", folder_, false), IsOk());
  EXPECT_THAT(Names(), ElementsAre("one"));
  ASSERT_THAT(RemoveStaleTemporaries(parent_), IsOk());
  EXPECT_EQ(std::distance(fs::directory_iterator(parent_), {}), 1);
  EXPECT_THAT(RemoveStaleTemporaries(parent_ + "/none"), IsOk());
}

TEST(FileIoTest, TellsAFullDiskFromOtherErrors) {
  EXPECT_THAT(ErrnoStatus(ENOSPC, "writing w"),
              IsStatus(absl::StatusCode::kResourceExhausted, "writing w"));
  EXPECT_THAT(ErrnoStatus(EDQUOT, "w"),
              IsStatus(absl::StatusCode::kResourceExhausted, "w"));
  EXPECT_THAT(ErrnoStatus(EIO, "w"),
              IsStatus(absl::StatusCode::kInternal, "w"));
}

}  // namespace
}  // namespace weft
