#include "src/log/damage.h"

#include <filesystem>
#include <functional>
#include <future>

#include "src/log/image_file.h"
#include "src/log/recorder.h"
#include "tests/journal/journal_folder.h"

namespace weft::records {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr AdapterKey kA{1}, kB{2}, kC{3};

// A log that a recorder has written. Each record is a group of its own.
class DamageTest : public testing::Test {
 protected:
  DamageTest() {
    absl::StatusOr<std::unique_ptr<journal::LogWriter>> log =
        journal::LogWriter::Open(folder_.get(), 1, {}, &metrics_);
    EXPECT_THAT(log, IsOk());
    recorder_ = std::make_unique<Recorder>();
    recorder_->Start(*std::move(log), {}, "threads=2", {}, {});
    Flush();
  }

  // Waits until everything is on disk. Returns where the next record begins.
  size_t Flush() {
    std::promise<void> durable;
    recorder_->WhenDurable([&] { durable.set_value(); });
    durable.get_future().wait();
    return std::filesystem::file_size(segment_);
  }
  // Writes a record. Returns where it begins in the segment.
  size_t Write(const Record& record) {
    const size_t offset = Flush();
    recorder_->Write(record);
    Flush();
    return offset;
  }
  size_t Make(AdapterKey key, const std::string& name) {
    return Write(StoredAdapter{.key = key, .adapter_id = name});
  }
  size_t Change(AdapterKey key) {
    return Write(ReleaseRecord{.key = key, .name = "s"});
  }
  // Begins a new segment, whose first record has a census.
  void Census() {
    const uint64_t first = recorder_->BeginSnapshot();
    segment_ = files_.Segment(first);
    std::promise<void> durable;
    recorder_->WhenDurable([&] { durable.set_value(); });
    durable.get_future().wait();
  }

  // Flips a bit inside the record at this offset of the first segment.
  void Flip(size_t offset) const {
    std::string bytes = journal::ReadBytes(first_segment_);
    bytes.at(offset + journal::RecordHeader::kBytes) ^= 1;
    journal::WriteBytes(first_segment_, bytes);
  }

  Damage Find(const std::optional<std::set<std::string>>& suspects =
                  std::set<std::string>()) const {
    const absl::StatusOr<Damage> damage = FindDamage(*folder_, suspects);
    EXPECT_THAT(damage, IsOk());
    return damage.ok() ? *damage : Damage{};
  }
  // Returns the names of damaged adapters with what happened to each.
  std::map<std::string, std::string> Hit(
      const std::optional<std::set<std::string>>& suspects =
          std::set<std::string>()) const {
    std::map<std::string, std::string> hit;
    for (const auto& [key, adapter] : Find(suspects).adapters) {
      hit[adapter.name] = adapter.how;
    }
    return hit;
  }

  journal::TestFolder files_;
  std::unique_ptr<journal::StateFolder> folder_ = files_.Open();
  const std::filesystem::path first_segment_ = files_.Segment(1);
  std::filesystem::path segment_ = first_segment_;
  prometheus::Registry registry_;
  journal::LogMetrics metrics_{&registry_};
  std::unique_ptr<Recorder> recorder_;
};

using Names = std::map<std::string, std::string>;
constexpr char kLost[] = "records are lost";
constexpr char kMayBe[] = "records may be lost";

TEST_F(DamageTest, AWholeLogHasNone) {
  Make(kA, "a");
  Change(kA);
  EXPECT_THAT(LogIsDamaged(*folder_), IsOk());
  EXPECT_FALSE(*LogIsDamaged(*folder_));
  const Damage damage = Find();
  EXPECT_THAT(damage.places, IsEmpty());
  EXPECT_THAT(damage.adapters, IsEmpty());
  EXPECT_EQ(damage.next_key, 2);
  EXPECT_THAT(RefusalOf(damage, {}), IsOk());
}

TEST_F(DamageTest, EveryLostRecordIsThatOfItsAdapter) {
  std::vector<std::pair<size_t, std::string>> records = {
      {Make(kA, "a"), "a"}, {Make(kB, "b"), "b"}, {Make(kC, "c"), "c"}};
  for (int i = 0; i < 4; ++i) {
    records.emplace_back(Change(kA), "a");
    records.emplace_back(Change(kB), "b");
  }
  Census();
  const std::string whole = journal::ReadBytes(first_segment_);
  for (const auto& [offset, name] : records) {
    Flip(offset);
    EXPECT_TRUE(*LogIsDamaged(*folder_));
    EXPECT_EQ(Hit(), (Names{{name, kLost}})) << offset;
    journal::WriteBytes(first_segment_, whole);
  }
}

TEST_F(DamageTest, LaterRecordsClearTheirAdapterAndOthersMayBeHit) {
  Make(kA, "a");
  Make(kB, "b");
  Make(kC, "c");
  const size_t lost = Change(kB);
  Change(kA);
  Flip(lost);
  EXPECT_EQ(Hit(), (Names{{"b", kMayBe}, {"c", kMayBe}}));
}

TEST_F(DamageTest, ARecordOfNobodyHitsNobody) {
  Make(kA, "a");
  const size_t lost = Write(GivenUpRecord{.work = 7});
  Change(kA);
  Flip(lost);
  const Damage damage = Find();
  EXPECT_THAT(damage.adapters, IsEmpty());
  EXPECT_THAT(damage.places, ElementsAre(HasSubstr("lost: records 3 to 3")));
}

TEST_F(DamageTest, AWholeLostSegmentIsAttributed) {
  Make(kA, "a");
  Make(kB, "b");
  Census();
  const std::filesystem::path middle = segment_;
  Change(kB);
  Make(kC, "c");
  Census();
  for (const bool removed : {false, true}) {
    if (removed) {
      std::filesystem::remove(middle);
    } else {
      journal::WriteBytes(middle, "no segment");
    }
    const Damage damage = Find();
    ASSERT_EQ(damage.adapters.size(), 2u);
    EXPECT_EQ(damage.adapters.at(kB).name, "b");
    // The record that created C is lost, but the census has C's name.
    EXPECT_EQ(damage.adapters.at(kC).name, "c");
    EXPECT_GT(damage.next_key, static_cast<uint64_t>(kC));
  }
}

TEST_F(DamageTest, AnAdapterThatWasRemovedNeedsNobodysConsent) {
  Make(kA, "a");
  const size_t made = Make(kB, "b");
  const size_t removed = Write(RemovedRecord{.key = kB});
  Census();
  const std::string whole = journal::ReadBytes(first_segment_);
  for (const size_t lost : {made, removed}) {
    Flip(lost);
    const Damage damage = Find();
    EXPECT_THAT(damage.adapters, IsEmpty());
    EXPECT_THAT(damage.gone, ElementsAre(kB));
    journal::WriteBytes(first_segment_, whole);
  }
}

TEST_F(DamageTest, RecordsWithoutTrailsClearNobody) {
  // Earlier versions wrote records without trails (Trail in record.h).
  std::string bytes = journal::ReadBytes(first_segment_);
  const journal::SegmentHeader header = *journal::DecodeSegmentHeader(
      std::string_view(bytes).substr(0, journal::SegmentHeader::kBytes));
  auto append = [&, sequence = uint64_t{2}](const Record& record) mutable {
    journal::AppendRecord(header.salt, sequence++, 0, Encode(record), &bytes);
  };
  append(StoredAdapter{.key = kA, .adapter_id = "a"});
  append(StoredAdapter{.key = kB, .adapter_id = "b"});
  const size_t lost = bytes.size();
  append(ReleaseRecord{.key = kA, .name = "s"});
  append(ReleaseRecord{.key = kB, .name = "s"});
  recorder_.reset();
  journal::WriteBytes(first_segment_, bytes);
  Flip(lost);
  EXPECT_EQ(Hit(), (Names{{"a", kMayBe}, {"b", kMayBe}}));
}

TEST_F(DamageTest, NothingTellsWhatALostEndHeld) {
  Make(kA, "a");
  Census();
  journal::WriteBytes(segment_, "no segment");
  EXPECT_THAT(FindDamage(*folder_, std::set<std::string>()).status(),
              IsStatus(absl::StatusCode::kDataLoss, "end of the log"));
}

TEST_F(DamageTest, ImagesAreChecked) {
  const std::vector<float> values(1000, 1.5F);
  const std::vector<std::span<const float>> blocks(4, values);
  for (const auto& [key, name] :
       Names{{"1", "a"}, {"2", "b"}, {"3", "c"}, {"4", "d"}}) {
    ASSERT_THAT(journal::WriteImage(*folder_, name, blocks), IsOk());
    Write(StoredAdapter{.key = AdapterKey{std::stoull(key)},
                        .adapter_id = name,
                        .image = ImageRecord{.file = name, .versions = {1}}});
  }
  const std::filesystem::path images = files_.path() + "/images";
  std::filesystem::remove(images / "a");
  std::filesystem::resize_file(images / "b", 9000);
  std::string flipped = journal::ReadBytes(images / "c");
  flipped.at(9000) ^= 1;
  journal::WriteBytes(images / "c", flipped);
  const Names found = Hit();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_THAT(found.at("a"), HasSubstr("No such file"));
  EXPECT_THAT(found.at("b"), HasSubstr("another size"));
  // The check reads all bytes of an image only if its adapter is a suspect.
  // Without a set of suspects, it reads all bytes of all images.
  EXPECT_EQ(Hit(std::set<std::string>{"d"}).size(), 2u);
  EXPECT_THAT(Hit(std::set<std::string>{"c"}).at("c"),
              HasSubstr("another sum"));
  EXPECT_EQ(Hit(std::nullopt).size(), 3u);
  EXPECT_EQ(Find().adapters.at(kA).images, std::set<std::string>{"a"});
}

TEST(RefusalTest, NamesWhomNobodyHasGivenUp) {
  Damage damage{.places = {"segment 1"}, .adapters = {}, .gone = {}};
  damage.adapters[kA] = {.name = "a", .how = kLost, .images = {}};
  damage.adapters[kB] = {.name = "b", .how = kMayBe, .images = {}};
  const absl::Status refusal = RefusalOf(damage, {"a"});
  EXPECT_THAT(refusal, IsStatus(absl::StatusCode::kDataLoss,
                                "segment 1; adapter 'b': records may be lost"));
  EXPECT_THAT(std::string(refusal.message()), Not(HasSubstr("'a'")));
  EXPECT_THAT(std::string(refusal.message()), HasSubstr("--recover-adapter"));
  EXPECT_THAT(RefusalOf(damage, {"a", "b", "z"}), IsOk());
  EXPECT_THAT(ImageRefusal("a", absl::ResourceExhaustedError("no descriptor")),
              IsStatus(absl::StatusCode::kResourceExhausted, "no descriptor"));
}

}  // namespace
}  // namespace weft::records
