#include "src/log/log_writer.h"

#include <atomic>
#include <numeric>
#include <thread>

#include "absl/time/clock.h"
#include "tests/log/journal_folder.h"
#include "tests/support/failpoints.h"

namespace weft::log {
namespace {

using testing::ElementsAre;

class LogWriterTest : public testing::Test {
 protected:
  TestFolder files_;
  std::unique_ptr<StateFolder> folder_ = files_.Open();
};

// Waits up to 10 s until `condition` holds. Returns whether it does.
template <typename Condition>
bool Eventually(Condition condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

TEST_F(LogWriterTest, WritesRecordsThatAReaderReads) {
  const std::string big(3 << 20, 'x');
  const std::string binary("a\0\xff\n", 4);
  {
    TestLog log(*folder_, 0);
    EXPECT_EQ(log->Append("one"), 0);
    EXPECT_EQ(log->Append(""), 1);
    EXPECT_EQ(log->Append(big), 2);
    EXPECT_EQ(log->Append(binary), 3);
  }
  const LogContents contents = ReadLog(*folder_);
  EXPECT_THAT(contents.status, IsOk());
  EXPECT_THAT(contents.records, ElementsAre("one", "", big, binary));
  EXPECT_EQ(contents.next_sequence, 4);
  EXPECT_EQ(contents.torn_bytes, 0);
}

TEST_F(LogWriterTest, RunsTasksInOrderWhenWhatWasAppendedIsOnDisk) {
  ScopedFailpoints slow("journal.sync=sleep(5)");
  std::vector<int> order;
  TestLog log(*folder_, 7);
  log->WhenDurable([&] { order.push_back(-1); });
  for (int i = 0; i < 20; ++i) {
    const uint64_t sequence = log->Append("r");
    log->WhenDurable([&, i, sequence] {
      EXPECT_GT(log->durable_sequence(), sequence);
      order.push_back(i);
    });
  }
  log.Flush();
  std::vector<int> expected(21);
  std::iota(expected.begin(), expected.end(), -1);
  EXPECT_EQ(order, expected);
}

TEST_F(LogWriterTest, SyncsOnceForWhatGathersMeanwhile) {
  ScopedFailpoints slow("journal.sync=sleep(2)");
  constexpr int kThreads = 4, kRecords = 250;
  TestLog log(*folder_, 0);
  std::atomic<int> durable = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRecords; ++i) {
        log->Append(absl::StrCat(t, "/", i));
        log->WhenDurable([&] { ++durable; });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  log.Flush();
  EXPECT_EQ(durable, kThreads * kRecords);
  EXPECT_LT(FailpointHits("journal.sync"), kThreads * kRecords / 4);
  EXPECT_EQ(log->pending_bytes(), 0);
  EXPECT_EQ(log.metrics().records.Value(), kThreads * kRecords);
  EXPECT_EQ(log.metrics().pending_bytes.Value(), 0);
  EXPECT_EQ(log.metrics().bytes.Value() + SegmentHeader::kBytes,
            std::filesystem::file_size(files_.Segment(0)));
  log.Close();
  // The log has each thread's records in the order of the thread's appends.
  std::vector<int> next(kThreads, 0);
  for (const std::string& record : ReadLog(*folder_).records) {
    const int thread = record[0] - '0';
    EXPECT_EQ(record, absl::StrCat(thread, "/", next[thread]++));
  }
  EXPECT_EQ(next, std::vector<int>(kThreads, kRecords));
}

TEST_F(LogWriterTest, BoundsTheBytesOfAGroup) {
  ScopedFailpoints slow("journal.sync=sleep(50)#1");
  TestLog log(*folder_, 0);
  const std::string record(1 << 20, 'r');
  for (int i = 0; i < 50; ++i) log->Append(record);
  log.Flush();
  EXPECT_GE(FailpointHits("journal.sync"), 4);
  EXPECT_LT(FailpointHits("journal.sync"), 50);
  log.Close();
  EXPECT_EQ(ReadLog(*folder_).records, std::vector<std::string>(50, record));
}

TEST_F(LogWriterTest, BeginsSegmentsWhereItIsTold) {
  SetFailpoints("");
  TestLog log(*folder_, 5);
  EXPECT_EQ(log->StartSegment(), 5);
  log->Append("5");
  EXPECT_EQ(log->StartSegment(), 6);
  EXPECT_EQ(log->StartSegment(), 6);
  log->Append("6");
  log->Append("7");
  EXPECT_EQ(log->StartSegment(), 8);
  // Segment 8 exists before its first record.
  log.Flush();
  EXPECT_THAT(*folder_->Segments(), ElementsAre(5, 6, 8));
  EXPECT_EQ(FailpointHits("files.rename"), 3);
  log->Append("8");
  log.Close();
  EXPECT_THAT(ReadLog(*folder_, 5).records, ElementsAre("5", "6", "7", "8"));
  EXPECT_THAT(ReadLog(*folder_, 7).records, ElementsAre("7", "8"));
  EXPECT_EQ(ReadLog(*folder_, 9).next_sequence, 9);
}

TEST_F(LogWriterTest, EverySegmentHasASaltOfItsOwn) {
  TestLog(*folder_, 0)->Append("0");
  TestLog(*folder_, 1)->Append("1");
  const auto salt = [&](uint64_t first) {
    return DecodeSegmentHeader(ReadBytes(files_.Segment(first)))->salt;
  };
  EXPECT_NE(salt(0), salt(1));
  EXPECT_NE(salt(0), 0);
}

TEST_F(LogWriterTest, GoesOnWhereTheLogEnds) {
  TestLog(*folder_, 0)->Append("0");
  TestLog(*folder_, 1)->Append("1");
  TestLog(*folder_, 2);
  TestLog(*folder_, 2)->Append("2");
  EXPECT_THAT(ReadLog(*folder_).records, ElementsAre("0", "1", "2"));
}

TEST_F(LogWriterTest, RefusesToBeginAnywhereElse) {
  TestLog(*folder_, 0)->Append("0");
  prometheus::Registry registry;
  LogMetrics metrics(&registry);
  for (const uint64_t sequence : {0, 2}) {
    EXPECT_THAT(LogWriter::Open(folder_.get(), sequence, {}, &metrics).status(),
                IsStatus(absl::StatusCode::kFailedPrecondition,
                         absl::StrCat("record 1, not with ", sequence)));
  }
  // A snapshot may include records that the log does not have.
  ASSERT_THAT(folder_->WriteSnapshot({.next_sequence = 9}), IsOk());
  EXPECT_THAT(LogWriter::Open(folder_.get(), 1, {}, &metrics).status(),
              IsStatus(absl::StatusCode::kFailedPrecondition, "record 9"));
  TestLog(*folder_, 9)->Append("9");
  EXPECT_THAT(ReadLog(*folder_, 9).records, ElementsAre("9"));
}

TEST_F(LogWriterTest, RefusesToBeginBehindATornTail) {
  TestLog(*folder_, 0)->Append("0");
  WriteBytes(files_.Segment(0), ReadBytes(files_.Segment(0)) + "torn");
  prometheus::Registry registry;
  LogMetrics metrics(&registry);
  EXPECT_THAT(LogWriter::Open(folder_.get(), 1, {}, &metrics).status(),
              IsStatus(absl::StatusCode::kFailedPrecondition, "torn tail"));
  EXPECT_THAT(ReadLog(*folder_, 0, true).status, IsOk());
  TestLog(*folder_, 1)->Append("1");
  EXPECT_THAT(ReadLog(*folder_).records, ElementsAre("0", "1"));
}

TEST_F(LogWriterTest, WritesTheRestAfterAShortWrite) {
  ScopedFailpoints shorter("files.write=short@0.7|err(EINTR)@0.1");
  TestLog log(*folder_, 0);
  const std::string record(1000, 'r');
  for (int i = 0; i < 20; ++i) log->Append(record);
  log.Close();
  EXPECT_EQ(ReadLog(*folder_).records, std::vector<std::string>(20, record));
}

TEST_F(LogWriterTest, WaitsForRoomOnAFullDisk) {
  TestLog log(*folder_, 0);
  log->Append("before");
  log.Flush();
  const auto size = std::filesystem::file_size(files_.Segment(0));
  // A part of the group is written before the disk is full.
  SetFailpoints("files.write=short#1;files.write=err(ENOSPC)#2-1000000");
  log->Append(std::string(1000, 'x'));
  std::atomic<bool> durable = false;
  log->WhenDurable([&] { durable = true; });
  ASSERT_TRUE(Eventually([&] { return !log->stalled().ok(); }));
  EXPECT_THAT(log->stalled(), IsStatus(absl::StatusCode::kResourceExhausted,
                                       "No space left on device"));
  EXPECT_EQ(log.metrics().stalled.Value(), 1);
  EXPECT_EQ(std::filesystem::file_size(files_.Segment(0)), size);
  log->Append("meanwhile");
  EXPECT_EQ(log->pending_bytes(), 1009);
  // The write is tried repeatedly, and nothing counts as durable.
  const int64_t writes = FailpointHits("files.write");
  EXPECT_TRUE(
      Eventually([&] { return FailpointHits("files.write") > writes + 3; }));
  EXPECT_FALSE(durable);
  EXPECT_EQ(log->durable_sequence(), 1);
  EXPECT_THAT(log->failure(), IsOk());
  SetFailpoints("");
  EXPECT_TRUE(Eventually([&] { return durable.load(); }));
  log.Flush();
  EXPECT_THAT(log->stalled(), IsOk());
  EXPECT_EQ(log.metrics().stalled.Value(), 0);
  log.Close();
  EXPECT_THAT(ReadLog(*folder_).records,
              ElementsAre("before", std::string(1000, 'x'), "meanwhile"));
}

TEST_F(LogWriterTest, WaitsForRoomForASegment) {
  TestLog log(*folder_, 0);
  log->Append("0");
  log.Flush();
  SetFailpoints("files.create=err(ENOSPC)");
  log->StartSegment();
  log->Append("1");
  ASSERT_TRUE(Eventually([&] { return !log->stalled().ok(); }));
  // Record 0 is on disk already, so it stays durable.
  EXPECT_EQ(log->durable_sequence(), 1);
  SetFailpoints("");
  log.Flush();
  log.Close();
  EXPECT_THAT(*folder_->Segments(), ElementsAre(0, 1));
  EXPECT_THAT(ReadLog(*folder_).records, ElementsAre("0", "1"));
}

TEST_F(LogWriterTest, TriesAFullDiskOnceMoreAtTheEnd) {
  std::atomic<int> ran = 0;
  for (const bool room : {true, false}) {
    TestLog log(*folder_, ran, {.retry = absl::Hours(1)});
    SetFailpoints(room ? "files.write=err(ENOSPC)#1"
                       : "files.write=err(ENOSPC)");
    log->Append("r");
    log->WhenDurable([&] { ++ran; });
    ASSERT_TRUE(Eventually([&] { return !log->stalled().ok(); }));
    log.Close();
    SetFailpoints("");
  }
  EXPECT_EQ(ran, 1);
  EXPECT_THAT(ReadLog(*folder_).records, ElementsAre("r"));
}

TEST_F(LogWriterTest, IsWrittenButStalledWithoutTheReserve) {
  TestLog log(
      *folder_, 0,
      {.disk_reserve_bytes = 1ULL << 62, .retry = absl::Milliseconds(5)});
  ASSERT_TRUE(Eventually([&] { return !log->stalled().ok(); }));
  EXPECT_THAT(log->stalled(), IsStatus(absl::StatusCode::kResourceExhausted,
                                       "the disk of the state folder is full"));
  EXPECT_EQ(log.metrics().stalled.Value(), 1);
  log->Append("0");
  log.Flush();
  EXPECT_EQ(log->durable_sequence(), 1);
  EXPECT_FALSE(log->stalled().ok());
  log.Close();
  EXPECT_THAT(ReadLog(*folder_).records, ElementsAre("0"));
}

TEST_F(LogWriterTest, GoesOnWhenTheReserveIsThereAgain) {
  TestLog log(*folder_, 0,
              {.disk_reserve_bytes = 1, .retry = absl::Milliseconds(5)});
  SetFailpoints("files.free_bytes=err(ENOSPC)");
  log->Append("0");
  ASSERT_TRUE(Eventually([&] { return !log->stalled().ok(); }));
  SetFailpoints("");
  EXPECT_TRUE(Eventually([&] { return log->stalled().ok(); }));
  EXPECT_EQ(log.metrics().stalled.Value(), 0);
}

TEST_F(LogWriterTest, IsWrittenIfTheFreeRoomIsUnknown) {
  SetFailpoints("files.free_bytes=err(EIO)");
  TestLog log(*folder_, 0,
              {.disk_reserve_bytes = 1, .retry = absl::Milliseconds(5)});
  log->Append("0");
  log.Flush();
  EXPECT_TRUE(
      Eventually([&] { return FailpointHits("files.free_bytes") > 0; }));
  EXPECT_THAT(log->stalled(), IsOk());
  SetFailpoints("");
}

TEST_F(LogWriterTest, SleepsAfterAFinalError) {
  TestLog log(*folder_, 0,
              {.disk_reserve_bytes = 1, .retry = absl::Milliseconds(1)});
  log->Append("0");
  log.Flush();
  SetFailpoints("journal.sync=err(EIO)");
  log->Append("1");
  log->WhenDurable([] {});
  ASSERT_TRUE(Eventually([&] { return !log->failure().ok(); }));
  const std::clock_t start = std::clock();
  absl::SleepFor(absl::Milliseconds(200));
  const double busy =
      static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  EXPECT_LT(busy, 0.1);
  SetFailpoints("");
}

TEST_F(LogWriterTest, ARecordForWhichNobodyWaitsSharesTheNextSync) {
  SetFailpoints("");
  TestLog log(*folder_, 0);
  log->Append("0");
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(FailpointHits("journal.sync"), 0);
  log->Append("1");
  log.Flush();
  EXPECT_EQ(FailpointHits("journal.sync"), 1);
  // But many bytes do not wait in memory.
  log->Append(std::string(2 << 20, 'x'));
  EXPECT_TRUE(Eventually([&] { return FailpointHits("journal.sync") == 2; }));
}

TEST_F(LogWriterTest, CountsAsStalledWhenTooMuchWaits) {
  ScopedFailpoints slow("journal.sync=sleep(50)");
  TestLog log(*folder_, 0, {.max_pending_bytes = 10});
  log->Append("0123456789");
  EXPECT_THAT(log->stalled(), IsOk());
  log->Append("x");
  EXPECT_THAT(log->stalled(), IsStatus(absl::StatusCode::kResourceExhausted,
                                       "more than 10 bytes of the log wait"));
  EXPECT_EQ(log.metrics().stalled.Value(), 1);
  log.Flush();
  EXPECT_THAT(log->stalled(), IsOk());
}

// What fails, and the error's message.
struct FinalError {
  const char* name;
  const char* failpoints;
  const char* message;
};

class FinalErrorTest : public LogWriterTest,
                       public testing::WithParamInterface<FinalError> {};

TEST_P(FinalErrorTest, RunsNoTaskAnyMore) {
  bool ran = false;
  TestLog log(*folder_, 0);
  log->Append("before");
  log.Flush();
  SetFailpoints(GetParam().failpoints);
  log->StartSegment();
  log->Append("lost");
  log->WhenDurable([&] { ran = true; });
  ASSERT_TRUE(Eventually([&] { return !log->failure().ok(); }));
  SetFailpoints("");
  EXPECT_THAT(log->failure(),
              IsStatus(absl::StatusCode::kUnavailable, GetParam().message));
  // The writer does not collect records that it will never write.
  const int64_t pending = log->pending_bytes();
  log->Append("late");
  EXPECT_EQ(log->pending_bytes(), pending);
  log->WhenDurable([&] { ran = true; });
  EXPECT_EQ(log->durable_sequence(), 1);
  log.Close();
  EXPECT_FALSE(ran);
  EXPECT_EQ(ReadLog(*folder_).records[0], "before");
}

INSTANTIATE_TEST_SUITE_P(
    Errors, FinalErrorTest,
    testing::Values(
        FinalError{"Write", "files.write=err(EIO)#2-9", "Input/output error"},
        FinalError{"Sync", "journal.sync=err(EIO)", "syncing"},
        // A failed sync must not be tried again, even if the disk was full.
        FinalError{"SyncOfAFullDisk", "journal.sync=err(ENOSPC)", "syncing"},
        FinalError{"CutBack",
                   "files.write=err(ENOSPC)#2;journal.cut_back=err(EIO)",
                   "cutting back"},
        FinalError{"NewSegment", "files.rename=err(EROFS)", "publishing"}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace weft::log
