// Cuts the power at every moment of a journal's work. A start must succeed from
// every disk that the loss of power may leave.
#include <fcntl.h>
#include <unistd.h>

#include <mutex>

#include "src/log/image.h"
#include "tests/log/disk_recorder.h"
#include "tests/log/journal_folder.h"
#include "tests/support/failpoints.h"

namespace weft::log {
namespace {

constexpr int kRandomDisks = 6;

// Some records are longer than one sector of the disk.
std::string RecordOf(uint64_t sequence) {
  return absl::StrCat(sequence, ":", std::string(sequence * 97 % 1500, 'r'));
}

std::vector<float> ImageOf(uint64_t sequence) {
  return std::vector<float>(300, static_cast<float>(sequence));
}

// What was acknowledged, and from which moment on.
struct Promise {
  size_t moment = 0;
  uint64_t records = 0;   // Records with lower numbers are durable.
  uint64_t snapshot = 0;  // A snapshot of all records below this number is
                          // durable.
};

class PowerLossTest : public testing::Test {
 protected:
  PowerLossTest() { std::filesystem::create_directory(files_.path()); }

  std::string state() const { return files_.path() + "/state"; }

  void Acknowledge(uint64_t records, uint64_t snapshot) {
    const std::lock_guard lock(mu_);
    Promise promise = promises_.empty() ? Promise() : promises_.back();
    promise.moment = recorder_.Moment();
    promise.records = std::max(promise.records, records);
    promise.snapshot = std::max(promise.snapshot, snapshot);
    promises_.push_back(promise);
  }

  void Append(LogWriter* log) {
    const uint64_t sequence = next_++;
    ASSERT_EQ(log->Append(RecordOf(sequence)), sequence);
    log->WhenDurable([=, this] { Acknowledge(sequence + 1, 0); });
  }

  void TakeSnapshot(StateFolder* folder, TestLog* log) {
    const uint64_t next = (*log)->StartSegment();
    log->Flush();
    const std::string name = absl::StrCat("image-", next);
    ASSERT_THAT(WriteImage(*folder, name, {ImageOf(next)}), IsOk());
    ASSERT_THAT(folder->WriteSnapshot({next, name}), IsOk());
    Acknowledge(0, next);
    ASSERT_THAT(folder->Cut(next, {name}), IsOk());
  }

  // Opens the folder, writes `groups` groups of 1 to 4 records, and closes the
  // folder. Takes a snapshot after every third group.
  void Work(int groups) {
    std::unique_ptr<StateFolder> folder =
        StateFolder::Open(state(), kModel).value();
    TestLog log(*folder, next_);
    for (int group = 0; group < groups; ++group) {
      for (int i = 0; i < 1 + group % 4; ++i) Append(log.operator->());
      log.Flush();
      if (group % 3 == 2) TakeSnapshot(folder.get(), &log);
    }
  }

  // Starts from a disk. Everything that was acknowledged is there, and work
  // continues.
  void CheckStart(const std::string& disk, const Promise& promise) {
    const auto folder = StateFolder::Open(disk + "/state", kModel).value();
    const auto snapshot = folder->ReadSnapshot().value();
    const uint64_t first = snapshot ? snapshot->next_sequence : 0;
    ASSERT_GE(first, promise.snapshot);
    if (snapshot) {
      std::vector<float> image(300);
      ASSERT_THAT(ReadImage(*folder, snapshot->bytes, {image}), IsOk());
      ASSERT_EQ(image, ImageOf(first));
    }
    const LogContents contents = ReadLog(*folder, first, true);
    ASSERT_THAT(contents.status, IsOk());
    ASSERT_GE(contents.next_sequence, promise.records);
    for (size_t i = 0; i < contents.records.size(); ++i) {
      ASSERT_EQ(contents.records[i], RecordOf(first + i));
    }
    TestLog(*folder, contents.next_sequence)->Append("goes on");
    const LogContents more = ReadLog(*folder, first);
    ASSERT_THAT(more.status, IsOk());
    ASSERT_EQ(more.records.size(), contents.records.size() + 1);
  }

  // Checks all disks of all moments from `first` on.
  void CheckAllDisks(size_t first) {
    const std::string disk = files_.path() + "-disk";
    std::mt19937 random(1);
    size_t promise = 0;
    for (size_t moment = first; moment <= recorder_.Moment(); ++moment) {
      while (promise + 1 < promises_.size() &&
             promises_[promise + 1].moment <= moment) {
        ++promise;
      }
      const bool promised =
          !promises_.empty() && promises_[promise].moment <= moment;
      for (int i = 0; i < 2 + kRandomDisks; ++i) {
        const auto loss = i == 0   ? DiskRecorder::Loss::kAll
                          : i == 1 ? DiskRecorder::Loss::kNone
                                   : DiskRecorder::Loss::kSome;
        recorder_.MakeDisk(moment, loss, &random, disk);
        CheckStart(disk, promised ? promises_[promise] : Promise());
        std::filesystem::remove_all(disk);
        if (HasFatalFailure()) {
          FAIL() << "after " << moment << " changes, disk " << i;
        }
      }
    }
  }

  TestFolder files_;
  DiskRecorder recorder_{
      (std::filesystem::create_directory(files_.path()), files_.path())};
  std::mutex mu_;
  std::vector<Promise> promises_;
  uint64_t next_ = 0;
};

TEST_F(PowerLossTest, LosesNothingThatWasAcknowledged) {
  Work(7);
  Work(4);
  ASSERT_GT(recorder_.Moment(), 100);
  CheckAllDisks(0);
}

TEST_F(PowerLossTest, LosesNothingThatWasWrittenWhileTheDiskWasFull) {
  // A group that does not fit is cut back and written again later. Short writes
  // write a group in parts.
  SetFailpoints("files.write=short@0.5|err(ENOSPC)#8-9|err(ENOSPC)#14", 5);
  Work(5);
  SetFailpoints("");
  CheckAllDisks(0);
}

TEST_F(PowerLossTest, LosesNothingThatAStartHasRead) {
  // A process that is killed before its sync leaves records that are not on the
  // disk yet. Once the next start has read them, they must not be lost.
  Work(2);
  const uint64_t before = next_;
  {
    auto folder = StateFolder::Open(state(), kModel).value();
    TestLog log(*folder, next_);
    SetFailpoints("journal.sync=err(EIO)");
    Append(log.operator->());
  }
  SetFailpoints("");
  {
    auto folder = StateFolder::Open(state(), kModel).value();
    ASSERT_EQ(ReadLog(*folder, 0).next_sequence, before + 1);
    Acknowledge(before + 1, 0);
  }
  CheckAllDisks(recorder_.Moment());
}

TEST_F(PowerLossTest, ARepairIsDoneBeforeTheLogGoesOn) {
  Work(2);
  // A torn tail is on the disk.
  const UniqueFd segment(::openat(
      AT_FDCWD, (state() + "/log/" + StateFolder::SegmentName(0)).c_str(),
      O_WRONLY));
  ASSERT_EQ(
      ::pwrite(segment.get(), "torn", 4, ::lseek(segment.get(), 0, SEEK_END)),
      4);
  ASSERT_EQ(::fsync(segment.get()), 0);
  const size_t torn = recorder_.Moment();
  {
    auto folder = StateFolder::Open(state(), kModel).value();
    ASSERT_EQ(ReadLog(*folder, 0, true).torn_bytes, 4);
  }
  std::mt19937 random(1);
  const std::string disk = files_.path() + "-disk";
  recorder_.MakeDisk(recorder_.Moment(), DiskRecorder::Loss::kAll, &random,
                     disk);
  EXPECT_EQ(ReadLog(**StateFolder::Open(disk + "/state", kModel)).torn_bytes,
            0);
  std::filesystem::remove_all(disk);
  Work(1);
  CheckAllDisks(torn);
}

TEST_F(PowerLossTest, LosesNoSnapshotThatAStartHasRead) {
  // The process is killed between the rename and the sync of the folder.
  Work(2);
  {
    auto folder = StateFolder::Open(state(), kModel).value();
    ASSERT_THAT(WriteImage(*folder, "image-2", {ImageOf(2)}), IsOk());
    ScopedFailpoints fail("files.sync_folder=err(EIO)");
    ASSERT_THAT(folder->WriteSnapshot({2, "image-2"}),
                IsStatus(absl::StatusCode::kInternal, "syncing"));
  }
  {
    auto folder = StateFolder::Open(state(), kModel).value();
    ASSERT_EQ((*folder->ReadSnapshot())->next_sequence, 2);
    Acknowledge(0, 2);
  }
  CheckAllDisks(recorder_.Moment());
}

}  // namespace
}  // namespace weft::log
