// Tests what is known about a log before it is replayed.
#include "src/log/log_summary.h"

#include <future>

#include "src/log/recorder.h"
#include "tests/log/journal_folder.h"

namespace weft::log {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr AdapterKey kA{1}, kB{2}, kC{3};

class LogSummaryTest : public testing::Test {
 protected:
  LogSummaryTest() {
    writer_ = LogWriter::Open(folder_.get(), 1, {}, &metrics_).value();
  }

  // Returns the record's sequence.
  uint64_t Write(const Record& record) {
    return writer_->Append(Encode(record));
  }
  uint64_t Make(AdapterKey key, const std::string& id) {
    return Write(StoredAdapter{
        .key = key, .adapter_id = id, .tenant = "tenant of " + id});
  }
  uint64_t Begin(uint64_t work, AdapterKey key) {
    return Write(BeginRecord{.work = work,
                             .key = key,
                             .step = 1,
                             .digest = "d",
                             .request = TrainRequest()});
  }
  uint64_t Batch(const std::vector<uint64_t>& works, bool last) {
    BatchRecord batch;
    for (const uint64_t work : works) {
      batch.slices.push_back({.work_id = work, .num_data = 1, .last = last});
    }
    return Write(batch);
  }

  absl::StatusOr<LogSummary> Read(const LogReading& reading = {
                                      .max_resident = 8}) {
    std::promise<void> durable;
    writer_->WhenDurable([&] { durable.set_value(); });
    durable.get_future().wait();
    return ReadLog(*folder_, {}, reading);
  }

  TestFolder files_;
  std::unique_ptr<StateFolder> folder_ = files_.Open();
  prometheus::Registry registry_;
  LogMetrics metrics_{&registry_};
  std::unique_ptr<LogWriter> writer_;
};

TEST_F(LogSummaryTest, AnIdIsNeededUpToTheLastRecordOfItsAdapters) {
  Make(kA, "a");
  Make(kB, "b");
  Begin(7, kA);
  const uint64_t batch = Batch({7}, /*last=*/true);
  const uint64_t removed = Write(RemovedRecord{.key = kB});
  const LogSummary log = Read().value();
  ASSERT_EQ(log.changed.size(), 2);
  EXPECT_EQ(log.changed.at("a").last, batch);
  EXPECT_EQ(log.changed.at("a").tenant, "tenant of a");
  EXPECT_EQ(log.changed.at("b").last, removed);
  EXPECT_EQ(log.next_sequence, removed + 1);
  EXPECT_THAT(log.adapters, ElementsAre(kA));
  EXPECT_THAT(log.given_up, IsEmpty());
}

// A client must not change the teacher before the replay has read it.
TEST_F(LogSummaryTest, ATeacherIsNeededUpToTheLastBatchThatReadsIt) {
  Make(kA, "a");
  const uint64_t made = Make(kB, "b");
  TrainRequest request;
  request.loss.function = LossFunction::kForwardKl;
  request.loss.teacher.adapter_id = "b";
  Write(BeginRecord{
      .work = 7, .key = kA, .step = 1, .digest = "d", .request = request});
  const uint64_t first = Batch({7}, /*last=*/false);
  const uint64_t second = Batch({7}, /*last=*/true);
  Begin(8, kA);
  const uint64_t third = Batch({8}, /*last=*/true);
  EXPECT_LT(made, first);
  // One adapter at a time is enough, because the teacher takes no room.
  const LogSummary log = Read({.max_resident = 1}).value();
  EXPECT_EQ(log.changed.at("b").last, second);
  EXPECT_EQ(log.changed.at("b").tenant, "tenant of b");
  EXPECT_EQ(log.changed.at("a").last, third);
}

// The log may begin after the last change of the teacher.
TEST_F(LogSummaryTest, ATeacherOfTheSnapshotIsNeededToo) {
  TrainRequest request;
  request.loss.function = LossFunction::kJs;
  request.loss.teacher.adapter_id = "b";
  Write(BeginRecord{
      .work = 7, .key = kA, .step = 1, .digest = "d", .request = request});
  const uint64_t batch = Batch({7}, /*last=*/true);
  std::promise<void> durable;
  writer_->WhenDurable([&] { durable.set_value(); });
  durable.get_future().wait();
  Snapshot snapshot;
  snapshot.adapters = {
      StoredAdapter{.key = kA, .adapter_id = "a", .tenant = "t"},
      StoredAdapter{.key = kB, .adapter_id = "b", .tenant = "t"}};
  const LogSummary log =
      ReadLog(*folder_, snapshot, {.max_resident = 8}).value();
  EXPECT_EQ(log.changed.at("b").last, batch);
}

TEST_F(LogSummaryTest, ARequestWithoutItsLastBatchIsGivenUp) {
  Make(kA, "a");
  Make(kB, "b");
  Begin(7, kA);
  Begin(8, kB);
  const uint64_t both = Batch({7, 8}, /*last=*/false);
  const uint64_t given_up = Write(GivenUpRecord{.work = 8});
  const LogSummary log = Read().value();
  EXPECT_THAT(log.given_up, ElementsAre(7));
  EXPECT_EQ(log.changed.at("a").last, both);
  EXPECT_EQ(log.changed.at("b").last, given_up);
}

// An accepted step runs in the next process, so it is only given up as far as
// it has begun.
TEST_F(LogSummaryTest, AnAcceptedStepGoesOnUntilItsEnd) {
  Make(kA, "a");
  const auto accept = [this](uint64_t work) {
    return Write(AcceptedRecord{.work = work,
                                .key = kA,
                                .step = work,
                                .digest = "d",
                                .request = TrainRequest()});
  };
  for (const uint64_t work : {7, 8, 9}) accept(work);
  Batch({7}, /*last=*/true);
  Batch({8}, /*last=*/false);
  Write(DoneRecord{.key = kA, .step = 9, .result = {}, .accepted = 9});
  const uint64_t last = accept(12);
  const LogSummary log = Read().value();
  EXPECT_THAT(log.given_up, ElementsAre(8));
  EXPECT_EQ(log.changed.at("a").last, last);
  EXPECT_EQ(log.next_work, 13);
}

TEST_F(LogSummaryTest, ABatchFindsTheAcceptedStepsOfTheSnapshot) {
  Snapshot snapshot;
  snapshot.adapters = {
      StoredAdapter{.key = kA, .adapter_id = "a", .tenant = "t"},
      StoredAdapter{.key = kB, .adapter_id = "b", .tenant = "t"}};
  snapshot.accepted = {
      {.work = 7, .key = kA, .step = 1, .request = TrainRequest()},
      {.work = 8, .key = kB, .step = 1, .request = TrainRequest()}};
  const uint64_t batch = Batch({7}, /*last=*/true);
  std::promise<void> durable;
  writer_->WhenDurable([&] { durable.set_value(); });
  durable.get_future().wait();
  const LogSummary log =
      ReadLog(*folder_, snapshot, {.max_resident = 8}).value();
  EXPECT_EQ(log.changed.at("a").last, batch);
  // Its step runs when the log is at its end, and until then nobody changes it.
  EXPECT_EQ(log.changed.at("b").last, 0);
  EXPECT_THAT(log.given_up, IsEmpty());
  EXPECT_EQ(log.next_work, 9);
}

TEST_F(LogSummaryTest, KeysAndEpochsOfAllAdaptersAreUsed) {
  Make(kA, "a");
  Write(
      StoredAdapter{.key = kC, .adapter_id = "c", .tenant = "t", .epoch = 50});
  Write(RemovedRecord{.key = kC});
  const LogSummary log = Read().value();
  EXPECT_EQ(log.next_key, 4);
  EXPECT_EQ(log.last_epoch, 50);
  EXPECT_THAT(log.adapters, ElementsAre(kA));
}

StoredAdapter Sent(AdapterKey key, const std::string& id) {
  return {.key = key,
          .adapter_id = id,
          .tenant = "t",
          .epoch = 70,
          .image = ImageRecord{.file = "gone", .versions = {1}}};
}

ArrivingRecord Arriving(AdapterKey key, const std::string& id) {
  return {.unit = id, .adapters = {Sent(key, id)}, .from = 1, .entry = "e"};
}

TEST_F(LogSummaryTest, AnAdapterThatLeavesIsNeededUpToTheEndOfItsMove) {
  Make(kA, "a");
  Make(kB, "b");
  Write(MoveRecord{.unit = "a", .to = 1, .entry = "e"});
  const uint64_t stayed =
      Write(MoveRecord{.unit = "a", .stage = MoveStage::kStayed});
  const uint64_t leaving =
      Write(MoveRecord{.unit = "b", .to = 1, .entry = "f"});
  const LogSummary log = Read().value();
  EXPECT_EQ(log.changed.at("a").last, stayed);
  EXPECT_EQ(log.changed.at("b").last, leaving);
  EXPECT_THAT(log.adapters, ElementsAre(kA, kB));
  EXPECT_THAT(log.names, ElementsAre("a"));
  EXPECT_THAT(log.moving, ElementsAre("b"));
}

// Its image may be missing until the adapter is the log's.
TEST_F(LogSummaryTest, AnArrivingAdapterIsNotYetTheLogs) {
  Make(kA, "a");
  const uint64_t arriving = Write(Arriving(kC, "c"));
  const LogSummary log = Read().value();
  EXPECT_THAT(log.adapters, ElementsAre(kA));
  EXPECT_THAT(log.moving, ElementsAre("c"));
  EXPECT_THAT(log.names, ElementsAre("a"));
  EXPECT_EQ(log.changed.at("c").last, arriving);
  EXPECT_EQ(log.changed.at("c").tenant, "t");
  EXPECT_EQ(log.next_key, 4);
  EXPECT_EQ(log.last_epoch, 70);
}

TEST_F(LogSummaryTest, ADroppedAdapterNeedsNoImage) {
  Write(Arriving(kC, "c"));
  const uint64_t dropped =
      Write(MoveRecord{.unit = "c", .stage = MoveStage::kDropped});
  const LogSummary log = Read().value();
  EXPECT_THAT(log.adapters, IsEmpty());
  EXPECT_EQ(log.changed.at("c").last, dropped);
}

TEST_F(LogSummaryTest, AnArrivedAdapterIsTheLogsAndHasItsImage) {
  Write(Arriving(kC, "c"));
  const uint64_t own = Write(MoveRecord{.unit = "c", .stage = MoveStage::kOwn});
  EXPECT_THAT(Read(), IsStatus(absl::StatusCode::kDataLoss,
                               "image \"gone\" is missing"));
  const LogSummary log =
      Read(
          {.max_resident = 8,
           .check_image = [](const auto&, size_t) { return absl::OkStatus(); }})
          .value();
  EXPECT_THAT(log.adapters, ElementsAre(kC));
  EXPECT_THAT(log.names, ElementsAre("c"));
  EXPECT_EQ(log.changed.at("c").last, own);
}

TEST_F(LogSummaryTest, ASessionComesAndGoesWithItsNotes) {
  const std::string session(32, 's');
  const std::string note = "tinker/model/" + session + ":train:0";
  const std::string usage = "tinker/usage/" + session;
  Write(NoteRecord{.name = usage, .value = "u"});
  Write(ArrivingRecord{.unit = session,
                       .adapters = {Sent(kA, session + ".train.0"),
                                    Sent(kB, "t~" + session + ".train.1")},
                       .notes = {{.name = note, .value = "m"}},
                       .from = 1,
                       .entry = "e"});
  const LogReading reading = {
      .max_resident = 8,
      .check_image = [](const auto&, size_t) { return absl::OkStatus(); }};
  EXPECT_EQ(Read(reading)->notes.count(note), 0u);
  Write(MoveRecord{.unit = session, .stage = MoveStage::kOwn});
  const LogSummary own = Read(reading).value();
  EXPECT_THAT(own.adapters, ElementsAre(kA, kB));
  EXPECT_EQ(*own.notes.at(note), "m");
  EXPECT_THAT(own.moving, IsEmpty());
  Write(MoveRecord{.unit = session, .to = 1, .entry = "f"});
  EXPECT_THAT(Read(reading)->moving, ElementsAre(session));
  EXPECT_THAT(Read(reading)->names, IsEmpty());
  Write(MoveRecord{.unit = session, .stage = MoveStage::kLeft});
  const LogSummary left = Read(reading).value();
  EXPECT_THAT(left.adapters, IsEmpty());
  EXPECT_THAT(left.moving, IsEmpty());
  EXPECT_EQ(left.notes.count(note), 0u);
  EXPECT_EQ(left.notes.count(usage), 1u);
}

TEST_F(LogSummaryTest, OnlyWhatWasOnItsWayArrives) {
  Write(MoveRecord{.unit = "c", .stage = MoveStage::kOwn});
  EXPECT_THAT(Read(), IsStatus(absl::StatusCode::kDataLoss, "on its way"));
}

TEST_F(LogSummaryTest, TheRecorderRecordsAnArrivedAdapterWhenItIsItsOwn) {
  Recorder recorder;
  recorder.Start(std::move(writer_), {}, absl::ZeroDuration(), "", {}, {});
  const ArrivingRecord arriving = Arriving(kC, "c");
  recorder.Write(arriving);
  EXPECT_FALSE(recorder.Has(kC));
  EXPECT_THAT(recorder.Images(), ElementsAre("gone"));
  recorder.Write(RemovedRecord{.key = kC});
  recorder.Own(arriving);
  EXPECT_TRUE(recorder.Has(kC));
  recorder.Write(ReleaseRecord{.key = kC, .name = "s"});
  recorder.Stop();
  const LogSummary log =
      ReadLog(
          *folder_, {},
          {.max_resident = 8,
           .check_image = [](const auto&, size_t) { return absl::OkStatus(); }})
          .value();
  // Settings, the arrival, its end, and the release.
  EXPECT_EQ(log.num_records, 4);
  EXPECT_THAT(log.adapters, ElementsAre(kC));
}

TEST_F(LogSummaryTest, NotesAreThoseOfTheSnapshotAndOfLaterRecords) {
  Recorder recorder;
  recorder.PutNote("before the start", "x");
  recorder.Start(std::move(writer_), {}, absl::Milliseconds(2), "", {}, {});
  recorder.PutNote("a/1", "one");
  recorder.PutNote("a/2", "two");
  recorder.PutNote("b", "b");
  recorder.EraseNote("a/1");
  Snapshot snapshot;
  recorder.BeginSnapshot(&snapshot);
  recorder.PutNote("a/3", std::string("\0\xff", 2));
  recorder.PutNote("a/2", "");
  recorder.EraseNote("b");
  EXPECT_EQ(recorder.NotesWith("a/").size(), 2);
  // Each record takes time to read. Those before the snapshot are not read.
  EXPECT_EQ(recorder.cost().time, absl::Milliseconds(18));
  recorder.FinishSnapshot();
  EXPECT_EQ(recorder.cost().time, absl::Milliseconds(8));
  recorder.Stop();
  const auto bytes = Encode(snapshot).value();
  auto decoded = DecodeSnapshot(bytes).value();
  EXPECT_EQ(*decoded.notes.at("a/2"), "two");
  EXPECT_EQ(*decoded.notes.at("b"), "b");
  decoded.first_sequence = snapshot.first_sequence;
  const LogSummary log =
      ReadLog(*folder_, decoded, {.max_resident = 8}).value();
  ASSERT_EQ(log.notes.size(), 2);
  EXPECT_EQ(*log.notes.at("a/2"), "");
  EXPECT_EQ(*log.notes.at("a/3"), std::string("\0\xff", 2));
}

TEST_F(LogSummaryTest, ABatchMustFitTheDevice) {
  Make(kA, "a");
  Make(kB, "b");
  Begin(7, kA);
  Batch({7}, /*last=*/false);
  Begin(8, kB);
  EXPECT_THAT(Read({.max_resident = 1}), IsOk());
  Batch({8}, /*last=*/true);
  EXPECT_THAT(Read({.max_resident = 2}), IsOk());
  EXPECT_THAT(Read({.max_resident = 1}),
              IsStatus(absl::StatusCode::kFailedPrecondition,
                       "--max-resident-adapters"));
}

TEST_F(LogSummaryTest, WhatNoStartCanReplayIsFoundBeforeItServes) {
  Make(kA, "a");
  Batch({7}, /*last=*/true);
  EXPECT_THAT(Read(), IsStatus(absl::StatusCode::kDataLoss,
                               "request 7, which has not begun"));
}

TEST_F(LogSummaryTest, AnAcceptedStepHasARequestOrTheErrorWithWhichItFails) {
  Make(kA, "a");
  Write(AcceptedRecord{.work = 6,
                       .key = kA,
                       .step = 1,
                       .refused = StepFailure{absl::InternalError("no")}});
  EXPECT_THAT(Read(), IsOk());
  Write(AcceptedRecord{.work = 7, .key = kA, .step = 2});
  EXPECT_THAT(Read(), IsStatus(absl::StatusCode::kDataLoss, "has no request"));
}

TEST_F(LogSummaryTest, AnImageThatTheLogNamesMustBeThere) {
  Write(StoredAdapter{.key = kA,
                      .adapter_id = "a",
                      .tenant = "t",
                      .image = ImageRecord{.file = "gone", .versions = {1}}});
  EXPECT_THAT(Read(), IsStatus(absl::StatusCode::kDataLoss,
                               "image \"gone\" is missing"));
}

}  // namespace
}  // namespace weft::log
