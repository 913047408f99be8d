#include "src/log/folder/state_folder.h"

#include <sys/wait.h>
#include <unistd.h>

#include "src/log/image.h"
#include "tests/log/journal_folder.h"
#include "tests/support/failpoints.h"

namespace weft::log {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::Field;
using testing::IsEmpty;
using testing::Optional;
using testing::UnorderedElementsAre;

class StateFolderTest : public testing::Test {
 protected:
  fs::path File(const std::string& name) const {
    return fs::path(files_.path()) / name;
  }
  std::vector<std::string> Names(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(File(folder))) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  TestFolder files_;
};

TEST_F(StateFolderTest, IsMadeAndOpenedAgain) {
  EXPECT_THAT(files_.Open()->ReadSnapshot(), IsOkAndHolds(std::nullopt));
  EXPECT_THAT(Names(""),
              UnorderedElementsAre("LOCK", "FORMAT", "log", "images"));
  EXPECT_EQ(fs::status(files_.path()).permissions(), fs::perms::owner_all);
  EXPECT_THAT(files_.Open()->CheckRoom(1 << 20), IsOk());
}

TEST_F(StateFolderTest, NeedsItsParent) {
  EXPECT_THAT(StateFolder::Open(files_.path() + "/a", kModel).status(),
              IsStatus(absl::StatusCode::kNotFound, "the state folder"));
}

TEST_F(StateFolderTest, BelongsToOneProcessAtATime) {
  auto folder = files_.Open();
  EXPECT_THAT(StateFolder::Open(files_.path(), kModel).status(),
              IsStatus(absl::StatusCode::kUnavailable, "another process"));
  // The lock ends with the process that has it, however the process ends.
  folder.reset();
  const pid_t child = ::fork();
  if (child == 0) {
    const auto held = StateFolder::Open(files_.path(), kModel);
    ::_exit(held.ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(StateFolder::Open(files_.path(), kModel).status(), IsOk());
}

TEST_F(StateFolderTest, BelongsToOneModel) {
  files_.Open();
  EXPECT_THAT(StateFolder::Open(files_.path(), "other 00").status(),
              IsStatus(absl::StatusCode::kFailedPrecondition,
                       "Start with that model, or with "
                       "--accept-base-model-change"));
}

TEST_F(StateFolderTest, SaysWhatDiffersAndTakesAnAcceptedChange) {
  ASSERT_THAT(StateFolder::Open(files_.path(), "ab hidden=64 rope=1").status(),
              IsOk());
  const std::string changed = "cd hidden=64 rope=2";
  EXPECT_THAT(StateFolder::Open(files_.path(), changed).status(),
              IsStatus(absl::StatusCode::kFailedPrecondition,
                       "than --model: rope is 1, here 2. Start with"));
  ASSERT_THAT(StateFolder::Open(files_.path(), changed, true).status(), IsOk());
  EXPECT_THAT(StateFolder::Open(files_.path(), changed).status(), IsOk());
}

TEST_F(StateFolderTest, RefusesAFormatThatItDoesNotKnow) {
  files_.Open();
  WriteBytes(File("FORMAT"), R"({"format_version": 4, "model": "x"})");
  EXPECT_THAT(
      StateFolder::Open(files_.path(), kModel).status(),
      IsStatus(absl::StatusCode::kFailedPrecondition,
               "format version 4; this program knows 5. Save checkpoints"));
  for (const char* text : {"", "[]", "{}", R"({"format_version":1})",
                           R"({"format_version":"5","model":"x"})",
                           R"({"format_version":5,"model":3})"}) {
    WriteBytes(File("FORMAT"), text);
    EXPECT_THAT(StateFolder::Open(files_.path(), kModel).status(),
                IsStatus(absl::StatusCode::kDataLoss, "FORMAT"));
  }
}

TEST_F(StateFolderTest, IsNotMadeNewOverALog) {
  TestLog(*files_.Open(), 0);
  fs::remove(File("FORMAT"));
  EXPECT_THAT(StateFolder::Open(files_.path(), kModel).status(),
              IsStatus(absl::StatusCode::kDataLoss, "FORMAT"));
}

TEST_F(StateFolderTest, RemovesWhatACrashLeft) {
  files_.Open();
  for (const char* name : {".tmp-SNAPSHOT-1", "log/.tmp-1", "images/.tmp-a"}) {
    WriteBytes(File(name), "half");
  }
  files_.Open();
  EXPECT_THAT(Names(""),
              UnorderedElementsAre("LOCK", "FORMAT", "log", "images"));
  EXPECT_THAT(Names("log"), IsEmpty());
  EXPECT_THAT(Names("images"), IsEmpty());
}

TEST_F(StateFolderTest, ReadsTheNewestSnapshot) {
  const auto folder = files_.Open();
  const std::string bytes(100000, 'b');
  ASSERT_THAT(folder->WriteSnapshot({9, "older"}), IsOk());
  ASSERT_THAT(folder->WriteSnapshot({100, bytes}), IsOk());
  const auto snapshot = folder->ReadSnapshot().value();
  EXPECT_THAT(snapshot, Optional(Field(&SnapshotFile::bytes, bytes)));
  EXPECT_EQ(snapshot->next_sequence, 100);
  // Another snapshot of the same records replaces the newest snapshot. A
  // snapshot of fewer records is refused.
  ASSERT_THAT(folder->WriteSnapshot({100, ""}), IsOk());
  EXPECT_THAT(*folder->ReadSnapshot(),
              Optional(Field(&SnapshotFile::bytes, "")));
  EXPECT_THAT(folder->WriteSnapshot({99, ""}),
              IsStatus(absl::StatusCode::kFailedPrecondition, "before 99"));
}

TEST_F(StateFolderTest, EveryFlippedBitAndEveryPrefixOfASnapshotIsDamage) {
  const auto folder = files_.Open();
  ASSERT_THAT(folder->WriteSnapshot({7, "snapshot"}), IsOk());
  const fs::path path = File("SNAPSHOT-00000000000000000007");
  const std::string whole = ReadBytes(path);
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    for (const std::string& bytes :
         {flipped, whole.substr(0, i), whole + "x"}) {
      WriteBytes(path, bytes);
      EXPECT_THAT(folder->ReadSnapshot(),
                  IsStatus(absl::StatusCode::kDataLoss,
                           "SNAPSHOT-00000000000000000007 is damaged"))
          << i;
    }
  }
  // A snapshot under the name of a later snapshot is refused too.
  WriteBytes(path, whole);
  fs::rename(path, File("SNAPSHOT-00000000000000000008"));
  EXPECT_THAT(folder->ReadSnapshot(),
              IsStatus(absl::StatusCode::kDataLoss, "damaged"));
}

TEST_F(StateFolderTest, KeepsTheOldSnapshotWhenTheNewOneFails) {
  const auto folder = files_.Open();
  ASSERT_THAT(folder->WriteSnapshot({7, "old"}), IsOk());
  for (const char* failpoint :
       {"files.create", "files.write", "files.sync", "files.rename"}) {
    ScopedFailpoints fail(absl::StrCat(failpoint, "=err(ENOSPC)"));
    EXPECT_THAT(folder->WriteSnapshot({8, "new"}),
                IsStatus(absl::StatusCode::kResourceExhausted, "SNAPSHOT-"));
    EXPECT_THAT(*folder->ReadSnapshot(),
                Optional(Field(&SnapshotFile::bytes, "old")));
  }
  // No temporary file is left on the full disk.
  EXPECT_EQ(Names("").size(), 5);
}

TEST_F(StateFolderTest, CutsWhatTheSnapshotMakesSuperfluous) {
  const auto folder = files_.Open();
  TestLog log(*folder, 0);
  for (int i = 0; i < 8; ++i) {
    if (i % 2 == 0) log->StartSegment();
    log->Append(absl::StrCat(i));
  }
  log.Flush();
  ASSERT_THAT(*folder->Segments(), ElementsAre(0, 2, 4, 6));
  for (const char* name : {"a", "b", "c"}) {
    ASSERT_THAT(WriteImage(*folder, name, {}), IsOk());
  }
  ASSERT_THAT(folder->WriteSnapshot({1, "old"}), IsOk());
  ASSERT_THAT(folder->WriteSnapshot({5, "new"}), IsOk());
  ASSERT_THAT(folder->Cut(5, {"b", "unknown"}), IsOk());
  // Segment 4 stays, because it has record 5.
  EXPECT_THAT(*folder->Segments(), ElementsAre(4, 6));
  EXPECT_THAT(*folder->Snapshots(), ElementsAre(5));
  EXPECT_THAT(Names("images"), ElementsAre("b"));
  EXPECT_THAT(ReadLog(*folder, 5).records, ElementsAre("5", "6", "7"));
  // The last segment stays, because it is being written.
  ASSERT_THAT(folder->WriteSnapshot({8, "all"}), IsOk());
  ASSERT_THAT(folder->Cut(8, {}), IsOk());
  EXPECT_THAT(*folder->Segments(), ElementsAre(6));
  log->Append("8");
  log.Close();
  EXPECT_THAT(ReadLog(*folder, 8).records, ElementsAre("8"));
}

TEST_F(StateFolderTest, CutsNothingThatNoSnapshotContains) {
  const auto folder = files_.Open();
  EXPECT_THAT(folder->Cut(1, {}),
              IsStatus(absl::StatusCode::kFailedPrecondition, "before 1"));
  ASSERT_THAT(WriteImage(*folder, "a", {}), IsOk());
  ASSERT_THAT(folder->WriteSnapshot({5, ""}), IsOk());
  EXPECT_THAT(folder->Cut(6, {}),
              IsStatus(absl::StatusCode::kFailedPrecondition, "before 6"));
  EXPECT_THAT(Names("images"), ElementsAre("a"));
}

TEST_F(StateFolderTest, EveryOperationThatFailsIsAnError) {
  files_.Open();
  for (const char* failpoint : {"journal.make_folder", "journal.lock",
                                "files.sync_folder", "files.read"}) {
    ScopedFailpoints fail(absl::StrCat(failpoint, "=err(EIO)"));
    EXPECT_THAT(StateFolder::Open(files_.path(), kModel).status(),
                IsStatus(absl::StatusCode::kInternal, "Input/output error"))
        << failpoint;
  }
  const auto folder = files_.Open();
  ASSERT_THAT(folder->WriteSnapshot({1, ""}), IsOk());
  ASSERT_THAT(folder->WriteSnapshot({2, ""}), IsOk());
  ScopedFailpoints fail("files.remove=err(EIO);files.free_bytes=err(EIO)");
  EXPECT_THAT(folder->Cut(2, {}),
              IsStatus(absl::StatusCode::kInternal, "removing SNAPSHOT-"));
  EXPECT_THAT(folder->CheckRoom(1),
              IsStatus(absl::StatusCode::kInternal, "free room"));
}

TEST_F(StateFolderTest, SaysThatNoDescriptorIsLeft) {
  ScopedFailpoints fail("journal.lock=err(EMFILE)");
  EXPECT_THAT(StateFolder::Open(files_.path(), kModel).status(),
              IsStatus(absl::StatusCode::kResourceExhausted, "LOCK"));
}

}  // namespace
}  // namespace weft::log
