// Tests which records of samples are kept, for whom and for how long.
#include "src/engine/records/sample_records.h"

#include <numeric>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/log/log_summary.h"
#include "tests/log/journal_folder.h"
#include "tests/support/fake_clock.h"

namespace weft::engine {
namespace {

using testing::IsNull;
using testing::NotNull;

// Returns a record with `tokens` drawn tokens.
SampleRecord RecordWith(const std::string& tenant, const std::string& id,
                        size_t tokens = 4) {
  SampleRecord record{.tenant = tenant,
                      .id = id,
                      .adapter = AdapterKey{3},
                      .num_prompt = 2,
                      .prompt_digest = std::string("\0digest\xff", 8),
                      .prompt_routing = {1, 2, 3, 65535},
                      .sequences = {}};
  SequenceRecord sequence{
      .tokens = {},
      .logprobs = {},
      .versions = {{.version = 7, .tokens = 1},
                   {.version = 8, .tokens = static_cast<uint32_t>(tokens - 1)}},
      .support = {},
      .routing = {}};
  for (size_t i = 0; i < tokens; ++i) {
    sequence.tokens.push_back(static_cast<int32_t>(i));
    sequence.logprobs.push_back(-0.5F * static_cast<float>(i));
    sequence.support.Add({static_cast<int32_t>(i), 99});
  }
  sequence.routing.assign((tokens - 1) * 2, 5);
  record.sequences = {sequence, sequence};
  return record;
}

// Returns the bytes that `record` takes in a store.
int64_t SizeOf(const SampleRecord& record) {
  return static_cast<int64_t>(EncodeSample(record).size() +
                              2 * record.id.size()) +
         256;
}

class SampleRecordsTest : public testing::Test {
 protected:
  SampleRecords& Make(int64_t max_bytes, const std::string& model = "m") {
    registry_ = std::make_unique<prometheus::Registry>();
    records_ = std::make_unique<SampleRecords>(max_bytes, model, &clock_,
                                               &recorder_, registry_.get());
    return *records_;
  }
  double Metric(const std::string& name) {
    for (const auto& family : registry_->Collect()) {
      if (family.name != name) continue;
      const auto& metric = family.metric.at(0);
      return metric.gauge.value + metric.counter.value;
    }
    return -1;
  }

  FakeClock clock_;
  log::Recorder recorder_;
  std::unique_ptr<prometheus::Registry> registry_;
  std::unique_ptr<SampleRecords> records_;
};

TEST_F(SampleRecordsTest, ARecordKeepsItsBits) {
  const SampleRecord record = RecordWith("t", "id");
  EXPECT_THAT(DecodeSample(EncodeSample(record)), IsOkAndHolds(record));
  SampleRecord narrow = record;
  narrow.prompt_routing.back() = 255;
  EXPECT_THAT(DecodeSample(EncodeSample(narrow)), IsOkAndHolds(narrow));
  // 4 experts of the prompt, and 6 of each sequence.
  EXPECT_EQ(EncodeSample(record).size() - EncodeSample(narrow).size(), 16);
  narrow.temperature = 0.7;
  narrow.edited = true;
  EXPECT_THAT(DecodeSample(EncodeSample(narrow)), IsOkAndHolds(narrow));
  SampleRecord dense = record;
  dense.prompt_routing.clear();
  for (SequenceRecord& sequence : dense.sequences) {
    sequence.routing.clear();
    sequence.support = {};
  }
  EXPECT_THAT(DecodeSample(EncodeSample(dense)), IsOkAndHolds(dense));
}

TEST_F(SampleRecordsTest, ARecordWhoseListsDoNotFitIsDataLoss) {
  const auto broken = [](auto change) {
    SampleRecord record = RecordWith("t", "id");
    change(record);
    return DecodeSample(EncodeSample(record)).status();
  };
  const auto lost = IsStatus(absl::StatusCode::kDataLoss, "");
  using R = SampleRecord;
  EXPECT_THAT(broken([](R& r) { r.num_prompt = 0; }), lost);
  EXPECT_THAT(broken([](R& r) { r.num_prompt = 3; }), lost);
  EXPECT_THAT(broken([](R& r) { r.sequences[1].tokens.clear(); }), lost);
  EXPECT_THAT(broken([](R& r) { r.sequences[1].logprobs.pop_back(); }), lost);
  EXPECT_THAT(broken([](R& r) { r.sequences[1].versions.pop_back(); }), lost);
  EXPECT_THAT(broken([](R& r) { r.sequences[1].routing.pop_back(); }), lost);
  EXPECT_THAT(broken([](R& r) { r.sequences[1].support.tokens.pop_back(); }),
              lost);
  EXPECT_THAT(broken([](R& r) { r.sequences[1].support.offsets[1] = 77; }),
              lost);
  EXPECT_THAT(DecodeSample("\xff\xff"), lost);
}

TEST_F(SampleRecordsTest, OnlyItsTenantFindsARecord) {
  SampleRecords& records = Make(1 << 20);
  records.Put(RecordWith("t", "id"));
  ASSERT_THAT(records.Find("t", "id"), NotNull());
  EXPECT_EQ(*records.Find("t", "id"), RecordWith("t", "id"));
  EXPECT_THAT(records.Find("u", "id"), IsNull());
  EXPECT_THAT(records.Find("", "id"), IsNull());
  EXPECT_THAT(records.Find("t", "other"), IsNull());
  // A tenant may use another's id.
  records.Put(RecordWith("u", "id", 9));
  EXPECT_EQ(*records.Find("t", "id"), RecordWith("t", "id"));
  EXPECT_EQ(Metric("weft_sample_records"), 2);
}

TEST_F(SampleRecordsTest, ANewRecordReplacesTheOneOfItsId) {
  SampleRecords& records = Make(1 << 20);
  records.Put(RecordWith("t", "id", 100));
  records.Put(RecordWith("t", "id", 3));
  EXPECT_EQ(*records.Find("t", "id"), RecordWith("t", "id", 3));
  EXPECT_EQ(Metric("weft_sample_records"), 1);
  EXPECT_EQ(Metric("weft_sample_record_bytes"),
            static_cast<double>(SizeOf(RecordWith("t", "id", 3))));
}

TEST_F(SampleRecordsTest, TheTenantWithTheMostBytesLosesItsLongestUnused) {
  const int64_t size = SizeOf(RecordWith("t", "a"));
  SampleRecords& records = Make(4 * size);
  records.Put(RecordWith("u", "x"));
  for (const char* id : {"a", "b", "c"}) records.Put(RecordWith("t", id));
  EXPECT_THAT(records.Find("t", "a"), NotNull());  // Now b is the oldest.
  records.Put(RecordWith("u", "y"));
  EXPECT_THAT(records.Find("t", "b"), IsNull());
  for (const char* id : {"a", "c"}) {
    EXPECT_THAT(records.Find("t", id), NotNull());
  }
  for (const char* id : {"x", "y"}) {
    EXPECT_THAT(records.Find("u", id), NotNull());
  }
  EXPECT_EQ(Metric("weft_sample_records_dropped_total"), 1);
  EXPECT_EQ(Metric("weft_sample_record_bytes"), static_cast<double>(4 * size));
  // A record that never has room takes none from others.
  records.Put(RecordWith("t", "huge", 10000));
  EXPECT_THAT(records.Find("t", "huge"), IsNull());
  for (const char* id : {"a", "c"}) {
    EXPECT_THAT(records.Find("t", id), NotNull());
  }
  EXPECT_EQ(Metric("weft_sample_records"), 4);
  EXPECT_EQ(Metric("weft_sample_records_dropped_total"), 2);
  // If it has the id of another, the other one is gone, too.
  records.Put(RecordWith("t", "a", 10000));
  EXPECT_THAT(records.Find("t", "a"), IsNull());
  EXPECT_LE(Metric("weft_sample_record_bytes"), 4 * size);
}

TEST_F(SampleRecordsTest, WithoutRoomForAnyNoneIsKept) {
  SampleRecords& records = Make(0);
  records.Put(RecordWith("t", "id"));
  EXPECT_THAT(records.Find("t", "id"), IsNull());
}

TEST_F(SampleRecordsTest, ARecordGoesADayAfterItsLastUse) {
  SampleRecords& records = Make(1 << 20);
  for (const char* id : {"used", "not"}) records.Put(RecordWith("t", id));
  records.Put(RecordWith("u", "not"));
  clock_.Advance(absl::Hours(23));
  records.DropExpired();
  EXPECT_THAT(records.Find("t", "used"), NotNull());
  clock_.Advance(absl::Hours(2));
  records.DropExpired();
  EXPECT_THAT(records.Find("t", "not"), IsNull());
  EXPECT_THAT(records.Find("u", "not"), IsNull());
  EXPECT_THAT(records.Find("t", "used"), NotNull());
  EXPECT_EQ(Metric("weft_sample_records_dropped_total"), 0);
  clock_.Advance(absl::Hours(25));
  records.DropExpired();
  EXPECT_EQ(Metric("weft_sample_record_bytes"), 0);
}

TEST_F(SampleRecordsTest, WhatAReplayTakesIsBounded) {
  SampleRecords& records = Make(1 << 20);
  const SampleRecord record = RecordWith("t", "id");
  records.Put(record);
  TrainRequest request;
  request.tenant = "t";
  request.loss.function = LossFunction::kPpo;
  Datum datum{.tokens = {60, 0, 1, 2},
              .targets = {0, 1, 2, 3},
              .weights = {},
              .logprobs = {},
              .advantages = {1, 1, 1, 1}};
  request.data = {datum, datum};
  request.replay = {.routing = true, .support = true, .logprobs = true};
  request.replay.spans = {{{.sequence_id = "id:1", .length = 4}}, {}};
  const int64_t bytes = records.ReplayBytes(request);
  ASSERT_THAT(records.Replay(AdapterKey{3}, &request), IsOk());
  const Datum& filled = request.data[0];
  const size_t taken = filled.logprobs.size() * sizeof(float) +
                       filled.support.offsets.size() * sizeof(uint32_t) +
                       filled.support.tokens.size() * sizeof(int32_t) +
                       filled.routing.size() * sizeof(uint16_t) +
                       3 * EncodeSample(record).size();
  EXPECT_EQ(filled.support.tokens.size(), 8);
  EXPECT_EQ(filled.routing.size(), 8);
  EXPECT_GE(bytes, static_cast<int64_t>(taken));
  EXPECT_LE(bytes, 2 * static_cast<int64_t>(taken));
  EXPECT_EQ(records.ReplayBytes(request), 0);
  EXPECT_EQ(request.replayed.versions, 7 + 3 * 8);
}

// Returns a request of `num_data` data, each of which is all of sequence id:0
// of RecordWith("t", "id", tokens).
TrainRequest Repeated(size_t num_data, int32_t tokens) {
  Datum datum;
  for (int32_t i = 0; i < tokens; ++i) {
    datum.tokens.push_back(i == 0 ? 60 : i - 1);
    datum.targets.push_back(i);
  }
  TrainRequest request;
  request.tenant = "t";
  request.replay.support = true;
  request.data.assign(num_data, datum);
  request.replay.spans.assign(
      num_data,
      {{.sequence_id = "id:0", .length = static_cast<uint32_t>(tokens)}});
  return request;
}

TEST_F(SampleRecordsTest, AStepTakesAtMostHalfAGibibyte) {
  SampleRecords& records = Make(1 << 30);
  SampleRecord record = RecordWith("t", "id", 256);
  for (SequenceRecord& sequence : record.sequences) {
    sequence.support = {};
    std::vector<int32_t> ids(1024);
    std::iota(ids.begin(), ids.end(), 0);
    for (size_t i = 0; i < 256; ++i) sequence.support.Add(ids);
  }
  records.Put(record);
  // 1 MiB of ids, and 8 bytes besides for each of 256 tokens.
  TrainRequest few = Repeated(2, 256);
  EXPECT_THAT(records.Replay(AdapterKey{3}, &few), IsOk());
  EXPECT_EQ(few.data[1].support.tokens.size(), 256 * 1024);
  TrainRequest many = Repeated(512, 256);
  EXPECT_THAT(records.Replay(AdapterKey{3}, &many),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "data take 537919488 bytes from records, the limit is "
                       "536870912: send fewer data a step"));
  // A short span takes no more than its own rows.
  for (std::vector<SampledSpan>& spans : many.replay.spans) {
    spans[0].length = 1;
  }
  EXPECT_THAT(records.Replay(AdapterKey{3}, &many), IsOk());
}

class RestartTest : public SampleRecordsTest {
 protected:
  ~RestartTest() override { recorder_.Stop(); }

  // Starts a new process, which has the notes of those before.
  void Start(int64_t max_bytes, const std::string& model = "m") {
    recorder_.Stop();
    const absl::StatusOr<log::LogSummary> log =
        log::ReadLog(*folder_, {}, {.max_resident = 8});
    ASSERT_THAT(log, IsOk());
    auto writer =
        log::LogWriter::Open(folder_.get(), log->next_sequence, {}, &metrics_)
            .value();
    recorder_.Start(std::move(writer), {}, {}, "", {}, log->notes);
    Make(max_bytes, model).Restore();
  }

  log::TestFolder files_;
  std::unique_ptr<log::StateFolder> folder_ = files_.Open();
  prometheus::Registry log_registry_;
  log::LogMetrics metrics_{&log_registry_};
};

TEST_F(RestartTest, ARestartKeepsRecordsAndForgetsThoseThatWent) {
  Start(1 << 20);
  for (const char* id : {"kept", "gone", "used"}) {
    records_->Put(RecordWith("t", id));
  }
  records_->Put(RecordWith("u", "kept", 9));
  clock_.Advance(absl::Hours(23));
  for (const char* id : {"kept", "used"}) (void)records_->Find("t", id);
  (void)records_->Find("u", "kept");
  clock_.Advance(absl::Hours(2));
  records_->DropExpired();
  recorder_.PutNote("sample/m/t/bad", std::string("not a record"));
  Start(1 << 20);
  EXPECT_EQ(*records_->Find("t", "kept"), RecordWith("t", "kept"));
  EXPECT_EQ(*records_->Find("u", "kept"), RecordWith("u", "kept", 9));
  EXPECT_THAT(records_->Find("t", "gone"), IsNull());
  EXPECT_EQ(Metric("weft_sample_records"), 3);
  EXPECT_EQ(recorder_.NotesWith("sample/").size(), 3);
  // A process that keeps none takes those of the earlier one out of the log.
  Start(0);
  EXPECT_TRUE(recorder_.NotesWith("sample/").empty());
}

TEST_F(RestartTest, AnotherBaseModelHasNoneOfTheRecords) {
  Start(1 << 20);
  records_->Put(RecordWith("t", "id"));
  Start(1 << 20, "another");
  EXPECT_THAT(records_->Find("t", "id"), IsNull());
  EXPECT_TRUE(recorder_.NotesWith("sample/").empty());
}

TEST_F(RestartTest, TheLogTakesLittleMoreThanTheValues) {
  Start(int64_t{1} << 30);
  const size_t tokens = 1000, width = 2;
  const log::ReplayCost before = recorder_.cost();
  records_->Put(RecordWith("t", "id", tokens));
  // The prompt of RecordWith has an expert that needs two bytes.
  const size_t values = 2 * tokens *
                        (sizeof(int32_t) + sizeof(float) + sizeof(uint32_t) +
                         2 * sizeof(int32_t) + width * sizeof(uint16_t));
  EXPECT_LT(recorder_.cost().bytes - before.bytes, values + 256);
}

}  // namespace
}  // namespace weft::engine
