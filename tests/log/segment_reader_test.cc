#include "src/log/folder/segment_reader.h"

#include <sys/stat.h>

#include <algorithm>

#include "src/log/log_format.h"
#include "tests/log/journal_folder.h"
#include "tests/support/failpoints.h"

namespace weft::log {
namespace {

using testing::ElementsAre;

constexpr uint64_t kSalt = 0x0123456789abcdef;

// Returns a segment whose groups hold these records.
std::string MakeSegment(uint64_t first,
                        const std::vector<std::vector<std::string>>& groups) {
  std::string bytes =
      EncodeSegmentHeader({.salt = kSalt, .first_sequence = first});
  for (const std::vector<std::string>& group : groups) {
    for (uint32_t place = 0; place < group.size(); ++place) {
      AppendRecord(kSalt, first++, place, group[place], &bytes);
    }
  }
  return bytes;
}

size_t SizeOf(const std::vector<std::vector<std::string>>& groups) {
  return MakeSegment(0, groups).size();
}

bool IsPrefix(const std::vector<std::string>& prefix,
              const std::vector<std::string>& all) {
  return prefix.size() <= all.size() &&
         std::equal(prefix.begin(), prefix.end(), all.begin());
}

class LogReaderTest : public testing::Test {
 protected:
  TestFolder files_;
  std::unique_ptr<StateFolder> folder_ = files_.Open();
  const std::vector<std::vector<std::string>> groups_ = {
      {"first", "second record"}, {"third"}, {"", "fifth", "sixth one"}};
  const std::vector<std::string> records_ = {
      "first", "second record", "third", "", "fifth", "sixth one"};
};

TEST_F(LogReaderTest, TheSumIsCrc32c) {
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283);
  EXPECT_EQ(Crc32c("56789", Crc32c("1234")), 0xe3069283);
  EXPECT_EQ(Crc32c(""), 0);
}

TEST_F(LogReaderTest, AnEmptyFolderHasNoRecords) {
  const LogContents contents = ReadLog(*folder_, 12);
  EXPECT_THAT(contents.status, IsOk());
  EXPECT_TRUE(contents.records.empty());
  EXPECT_EQ(contents.next_sequence, 12);
}

TEST_F(LogReaderTest, EveryPrefixIsALogOfWholeRecords) {
  const std::string whole = MakeSegment(0, groups_);
  size_t read_before = 0;
  for (size_t size = SegmentHeader::kBytes; size <= whole.size(); ++size) {
    WriteBytes(files_.Segment(0), whole.substr(0, size));
    const LogContents contents = ReadLog(*folder_, 0, true);
    ASSERT_THAT(contents.status, IsOk()) << size;
    ASSERT_TRUE(IsPrefix(contents.records, records_)) << size;
    ASSERT_GE(contents.records.size(), read_before);
    read_before = contents.records.size();
    // Repair keeps exactly what was read.
    ASSERT_EQ(std::filesystem::file_size(files_.Segment(0)),
              size - contents.torn_bytes);
    const LogContents again = ReadLog(*folder_);
    ASSERT_EQ(again.records, contents.records);
    ASSERT_EQ(again.torn_bytes, 0);
  }
  EXPECT_EQ(read_before, records_.size());
}

TEST_F(LogReaderTest, APrefixOfAHeaderIsDamage) {
  for (size_t size = 0; size < SegmentHeader::kBytes; ++size) {
    WriteBytes(files_.Segment(0), MakeSegment(0, {}).substr(0, size));
    EXPECT_THAT(ReadLog(*folder_).status,
                IsStatus(absl::StatusCode::kDataLoss, "header is bad"));
  }
}

TEST_F(LogReaderTest, AFlippedBitIsATornTailOrDamage) {
  const std::string whole = MakeSegment(0, groups_);
  const size_t last_group = SizeOf({groups_[0], groups_[1]});
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    WriteBytes(files_.Segment(0), flipped);
    const LogContents contents = ReadLog(*folder_);
    ASSERT_TRUE(IsPrefix(contents.records, records_)) << i;
    ASSERT_LT(contents.records.size(), records_.size()) << i;
    // No caller was told that the last group is durable, so damage there is a
    // torn tail. All other groups were durable.
    if (i >= last_group) {
      ASSERT_THAT(contents.status, IsOk()) << i;
      ASSERT_GT(contents.torn_bytes, 0) << i;
      ASSERT_GE(contents.records.size(), 3) << i;
    } else {
      ASSERT_THAT(contents.status, IsStatus(absl::StatusCode::kDataLoss,
                                            StateFolder::SegmentName(0)))
          << i;
    }
  }
}

TEST_F(LogReaderTest, DamageNamesSegmentAndOffset) {
  std::string bytes = MakeSegment(0, groups_);
  bytes[SizeOf({groups_[0]})] ^= 1;
  WriteBytes(files_.Segment(0), bytes);
  const LogContents contents = ReadLog(*folder_);
  EXPECT_THAT(
      contents.status,
      IsStatus(absl::StatusCode::kDataLoss,
               absl::StrCat("segment ", StateFolder::SegmentName(0),
                            " of the log, offset ", SizeOf({groups_[0]}),
                            ": a record is bad")));
  EXPECT_THAT(contents.records, ElementsAre("first", "second record"));
}

TEST_F(LogReaderTest, AGroupWithAHoleIsATornTail) {
  // A machine that loses power may have written a group's end but not its
  // beginning.
  std::string bytes = MakeSegment(0, groups_);
  const size_t last_group = SizeOf({groups_[0], groups_[1]});
  bytes.replace(last_group, RecordHeader::kBytes, RecordHeader::kBytes, '\0');
  WriteBytes(files_.Segment(0), bytes);
  const LogContents contents = ReadLog(*folder_);
  EXPECT_THAT(contents.status, IsOk());
  EXPECT_THAT(contents.records, ElementsAre("first", "second record", "third"));
  EXPECT_EQ(contents.torn_bytes, bytes.size() - last_group);
}

TEST_F(LogReaderTest, FindsALaterGroupFarBehindABadRecord) {
  for (const size_t distance : {size_t{100}, (size_t{1} << 20) - 40,
                                (size_t{1} << 20) - 28, size_t{3} << 20}) {
    std::string bytes =
        MakeSegment(0, {{"bad", std::string(distance, 'x')}, {"later"}});
    bytes[SegmentHeader::kBytes] ^= 1;
    WriteBytes(files_.Segment(0), bytes);
    EXPECT_THAT(ReadLog(*folder_).status,
                IsStatus(absl::StatusCode::kDataLoss, "good ones follow"))
        << distance;
  }
}

TEST_F(LogReaderTest, ARecordInsideOfARecordIsNone) {
  // A client may know the format and guess the sequence, but not the salt.
  std::string forged;
  AppendRecord(kSalt + 1, 7, 0, "forged", &forged);
  std::string bytes = MakeSegment(0, {{"first"}, {forged + forged}});
  const size_t torn = SizeOf({{"first"}});
  bytes[torn] ^= 1;
  WriteBytes(files_.Segment(0), bytes);
  const LogContents contents = ReadLog(*folder_);
  EXPECT_THAT(contents.status, IsOk());
  EXPECT_EQ(contents.torn_bytes, bytes.size() - torn);
}

TEST_F(LogReaderTest, ARecordOfAnotherPlaceIsNone) {
  // Exchanges two records of equal length, removes one, and duplicates one.
  const std::string header = MakeSegment(0, {});
  const auto record = [&](const char* text) {
    std::string bytes;
    AppendRecord(kSalt, text[0] - '0', 0, text, &bytes);
    return bytes;
  };
  const std::string zero = record("0"), one = record("1"), two = record("2");
  for (const std::string& bytes :
       {header + one + zero + two, header + zero + two, header + one}) {
    WriteBytes(files_.Segment(0), bytes);
    EXPECT_THAT(ReadLog(*folder_).status,
                IsStatus(absl::StatusCode::kDataLoss, "good ones follow"));
  }
  WriteBytes(files_.Segment(0), header + zero + zero);
  EXPECT_THAT(ReadLog(*folder_).records, ElementsAre("0"));
}

TEST_F(LogReaderTest, ALengthBeyondTheFileTakesNoMemory) {
  std::string bytes = MakeSegment(0, {{"first"}});
  std::string huge;
  AppendRecord(kSalt, 1, 0, "x", &huge);
  for (const uint64_t length : {uint64_t{1} << 40, ~uint64_t{0}}) {
    std::string record = huge;
    record.replace(16, 8, reinterpret_cast<const char*>(&length), 8);
    // Makes the checksum correct, so that only the length is wrong.
    const uint32_t sum =
        Crc32c(record.substr(4, 24),
               Crc32c({reinterpret_cast<const char*>(&kSalt), sizeof(kSalt)}));
    record.replace(0, 4, reinterpret_cast<const char*>(&sum), 4);
    ASSERT_TRUE(DecodeRecordHeader(kSalt, record));
    WriteBytes(files_.Segment(0), bytes + record);
    const LogContents contents = ReadLog(*folder_);
    EXPECT_THAT(contents.status, IsOk());
    EXPECT_THAT(contents.records, ElementsAre("first"));
  }
}

TEST_F(LogReaderTest, ReadsSegmentsOneAfterTheOther) {
  WriteBytes(files_.Segment(3), MakeSegment(3, {{"3", "4"}}));
  WriteBytes(files_.Segment(5), MakeSegment(5, {{"5"}}));
  WriteBytes(files_.Segment(6), MakeSegment(6, {}));
  EXPECT_THAT(ReadLog(*folder_, 3).records, ElementsAre("3", "4", "5"));
  EXPECT_THAT(ReadLog(*folder_, 4).records, ElementsAre("4", "5"));
  EXPECT_THAT(ReadLog(*folder_, 6).records, ElementsAre());
  const auto reader = folder_->OpenLog(5).value();
  EXPECT_EQ(reader->total_bytes(),
            MakeSegment(5, {{"5"}}).size() + SegmentHeader::kBytes);
}

TEST_F(LogReaderTest, AMissingSegmentIsDamage) {
  WriteBytes(files_.Segment(3), MakeSegment(3, {{"3", "4"}}));
  WriteBytes(files_.Segment(5), MakeSegment(5, {{"5"}}));
  WriteBytes(files_.Segment(6), MakeSegment(6, {{"6"}}));
  EXPECT_THAT(
      ReadLog(*folder_, 2).status,
      IsStatus(absl::StatusCode::kDataLoss, "lacks the records from 2 to 2"));
  std::filesystem::remove(files_.Segment(5));
  const LogContents contents = ReadLog(*folder_, 3);
  EXPECT_THAT(contents.status,
              IsStatus(absl::StatusCode::kDataLoss, "records from 5 to 5"));
  EXPECT_THAT(contents.records, ElementsAre("3", "4"));
}

TEST_F(LogReaderTest, ATornTailBeforeTheLastSegmentIsDamage) {
  const std::string whole = MakeSegment(0, {{"0", "1"}});
  WriteBytes(files_.Segment(0), whole.substr(0, whole.size() - 1));
  WriteBytes(files_.Segment(2), MakeSegment(2, {}));
  const LogContents contents = ReadLog(*folder_);
  EXPECT_THAT(contents.status,
              IsStatus(absl::StatusCode::kDataLoss, "a record is bad"));
  EXPECT_THAT(contents.records, ElementsAre("0"));
}

TEST_F(LogReaderTest, ASegmentOfAnotherNameIsDamage) {
  WriteBytes(files_.Segment(3), MakeSegment(4, {{"4"}}));
  EXPECT_THAT(ReadLog(*folder_, 3).status,
              IsStatus(absl::StatusCode::kDataLoss, "header is bad"));
}

TEST_F(LogReaderTest, DoesNotReadThroughALinkOrAPipe) {
  WriteBytes(files_.Segment(9), MakeSegment(3, {{"3"}}));
  std::filesystem::create_symlink(files_.Segment(9), files_.Segment(3));
  EXPECT_THAT(ReadLog(*folder_, 3).status,
              IsStatus(absl::StatusCode::kInternal, "symbolic"));
  std::filesystem::remove(files_.Segment(3));
  ASSERT_EQ(::mkfifo(files_.Segment(3).c_str(), 0600), 0);
  EXPECT_THAT(ReadLog(*folder_, 3).status,
              IsStatus(absl::StatusCode::kDataLoss, "not a plain file"));
}

TEST_F(LogReaderTest, ErrorsOfTheDiskAreNoTornTail) {
  WriteBytes(files_.Segment(0), MakeSegment(0, groups_));
  ScopedFailpoints fail("files.read=err(EIO)#4-9");
  const LogContents contents = ReadLog(*folder_);
  EXPECT_THAT(contents.status,
              IsStatus(absl::StatusCode::kInternal, "Input/output error"));
  EXPECT_THAT(contents.records, ElementsAre("first"));
}

TEST_F(LogReaderTest, ARepairThatFailsSaysSo) {
  WriteBytes(files_.Segment(0), MakeSegment(0, groups_) + "torn");
  for (const char* name : {"journal.repair", "journal.sync_repair",
                           "journal.sync_tail", "journal.open_log"}) {
    ScopedFailpoints fail(absl::StrCat(name, "=err(EIO)"));
    EXPECT_THAT(ReadLog(*folder_, 0, true).status,
                IsStatus(absl::StatusCode::kInternal, "Input/output error"))
        << name;
  }
}

}  // namespace
}  // namespace weft::log
