// Tests copies of a state between a folder and an object store, and what reads
// do while a server cuts the state.
#include "src/log/copy/copy_state.h"

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/manifest.h"
#include "src/log/bucket/state_bucket.h"
#include "src/log/image.h"
#include "src/log/log_summary.h"
#include "src/log/record.h"
#include "src/log/verify.h"
#include "tests/log/journal_folder.h"
#include "tests/support/memory_store.h"

namespace weft::log {
namespace {

namespace fs = std::filesystem;
using store::MemoryObjects;
using store::MemoryStore;
using testing::ElementsAre;
using testing::IsEmpty;

std::vector<float> Values(float value) { return {value, 2, 3}; }

// Makes an image with the blocks of one version.
void MakeImage(State& state, const std::string& name, float value) {
  const std::vector<float> block = Values(value);
  const std::vector<float> zeros(3);
  ASSERT_THAT(WriteImage(state, name, {zeros, zeros, zeros, block}), IsOk());
}

float ValueOf(const State& state, const std::string& name) {
  std::vector<float> first(3);
  std::vector<float> second(3);
  std::vector<float> third(3);
  std::vector<float> block(3);
  EXPECT_THAT(ReadImage(state, name, {first, second, third, block}), IsOk());
  return block[0];
}

StoredAdapter AdapterWith(uint64_t key, const std::string& image) {
  return {.key = AdapterKey{key},
          .adapter_id = "adapter " + image,
          .image = ImageRecord{.file = image, .versions = {1}}};
}

// A server with a state: it makes adapters, and snapshots of them.
class Server {
 public:
  // `state` is not written yet, or is at `next`.
  explicit Server(State* state, uint64_t next = 1)
      : state_(*state), next_(next) {
    log_ = state_.ContinueLog(next).value();
  }

  // Records an adapter with an image of this value. Returns the image.
  std::string Add(float value) {
    const std::string image = state_.NewImageName();
    MakeImage(state_, image, value);
    adapters_.push_back(AdapterWith(++last_key_, image));
    images_.insert(image);
    const std::vector<std::string> group = {Encode(Record(adapters_.back()))};
    EXPECT_THAT(log_->WriteGroup(next_++, group).status(), IsOk());
    return image;
  }

  void Write(const Record& record) {
    EXPECT_THAT(log_->WriteGroup(next_++, {Encode(record)}).status(), IsOk());
  }

  // Records that all adapters are gone.
  void RemoveAll() {
    for (const StoredAdapter& adapter : adapters_) {
      const Record record = RemovedRecord{.key = adapter.key};
      EXPECT_THAT(log_->WriteGroup(next_++, {Encode(record)}).status(), IsOk());
    }
    adapters_.clear();
    images_.clear();
  }

  // Writes a snapshot, and removes what it replaces.
  void Snap() {
    Snapshot snapshot;
    snapshot.adapters = adapters_;
    EXPECT_THAT(log_->BeginSegment(next_), IsOk());
    EXPECT_THAT(state_.WriteSnapshot({.next_sequence = next_,
                                      .bytes = Encode(snapshot).value()}),
                IsOk());
    EXPECT_THAT(state_.Cut(next_, images_), IsOk());
  }

  uint64_t next() const { return next_; }

 private:
  State& state_;
  std::unique_ptr<LogSink> log_;
  uint64_t next_;
  uint64_t last_key_ = 0;
  std::vector<StoredAdapter> adapters_;
  std::set<std::string> images_;
};

class CopyStateTest : public testing::Test {
 protected:
  static std::unique_ptr<StateBucket> Open(MemoryObjects* objects) {
    auto bucket = StateBucket::Open(std::make_unique<MemoryStore>(objects),
                                    std::nullopt, false);
    EXPECT_THAT(bucket, IsOk());
    return *std::move(bucket);
  }

  // Returns a state whose log this process has.
  static std::unique_ptr<StateBucket> Own(MemoryObjects* objects,
                                          absl::Duration patience) {
    auto bucket =
        StateBucket::Open(std::make_unique<MemoryStore>(objects), kModel, false)
            .value();
    const Instance self = {.name = "daemon", .process = "1"};
    std::vector<LogWatch> watches(
        1, LogWatch(self, patience, absl::InfiniteDuration()));
    EXPECT_THAT(bucket->TryTake(self, &watches), IsOkAndHolds(true));
    return bucket;
  }

  static SeenManifest Seen(MemoryObjects* objects) {
    MemoryStore store(objects);
    return LookAtManifest(store, LogKeys()).value();
  }

  static absl::StatusOr<CopyReport> ToStore(const State& from,
                                            MemoryObjects* objects) {
    return CopyToStore(from, std::make_unique<MemoryStore>(objects));
  }

  std::vector<std::string> Keys(MemoryObjects* objects,
                                const std::string& prefix) {
    std::vector<std::string> keys;
    const auto found =
        MemoryStore(objects).List(prefix, "", store::kAllObjects).value();
    for (const store::ListedObject& object : found) {
      keys.push_back(object.key.substr(prefix.size()));
    }
    return keys;
  }

  TestFolder files_;
  MemoryObjects objects_;
  MemoryObjects copy_;
};

TEST_F(CopyStateTest, AStateGoesFromAFolderToAStoreAndBack) {
  const std::unique_ptr<StateFolder> folder = files_.Open();
  Server server(folder.get());
  const std::string first = server.Add(1);
  server.Snap();
  const std::string second = server.Add(2);
  // The server still has the folder.
  const auto source = StateFolder::OpenToRead(files_.path());
  ASSERT_THAT(source, IsOk());
  const auto copied = ToStore(**source, &copy_);
  ASSERT_THAT(copied, IsOk());
  EXPECT_EQ(copied->records, 1);
  EXPECT_EQ(copied->images, 2);

  const std::unique_ptr<StateBucket> bucket = Open(&copy_);
  EXPECT_EQ(bucket->model(), kModel);
  const std::string back = files_.path() + ".back";
  ASSERT_THAT(CopyToFolder(*bucket, back), IsOk());
  const auto again = StateFolder::Open(back, kModel);
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ((*again)->ReadSnapshot().value()->bytes,
            folder->ReadSnapshot().value()->bytes);
  EXPECT_EQ(ReadLog(**again, 2).records, ReadLog(*folder, 2).records);
  EXPECT_EQ(ValueOf(**again, first), 1);
  EXPECT_EQ(ValueOf(**again, second), 2);
  EXPECT_THAT(CopyToFolder(*bucket, back),
              IsStatus(absl::StatusCode::kAlreadyExists, back));
}

TEST_F(CopyStateTest, MovesOfAdaptersEndInACopy) {
  const std::unique_ptr<StateFolder> folder = files_.Open();
  Server server(folder.get());
  const std::string image = server.Add(1);
  MakeImage(*folder, "arrived", 2);
  const auto arrive = [&server](uint64_t key, const std::string& file) {
    server.Write(ArrivingRecord{.unit = "adapter " + file,
                                .adapters = {AdapterWith(key, file)},
                                .entry = "e"});
  };
  const auto end = [&server](const std::string& file, MoveStage stage) {
    server.Write(MoveRecord{.unit = "adapter " + file, .stage = stage});
  };
  arrive(7, "arrived");
  end("arrived", MoveStage::kOwn);
  arrive(8, "dropped");
  end("dropped", MoveStage::kDropped);
  // Those of keys 1 and 9 are open.
  arrive(9, "arriving");
  end(image, MoveStage::kLeaving);
  ASSERT_THAT(ToStore(*folder, &copy_), IsOk());

  const std::unique_ptr<StateBucket> bucket = Open(&copy_);
  const LogSummary log =
      ReadLog(*bucket, {}, {.max_resident = 8, .cuts = false}).value();
  EXPECT_EQ(log.num_records, 9);
  EXPECT_THAT(log.names, ElementsAre("adapter " + image, "adapter arrived"));
  EXPECT_EQ(ValueOf(*bucket, "arrived"), 2);
  EXPECT_EQ(Keys(&copy_, "logs/0/images/").size(), 2);
  EXPECT_THAT(VerifyState(*bucket), IsOk());
}

// Checkpoints have their writer's epoch, and no lower one replaces them. They
// may be copied after the state.
TEST_F(CopyStateTest, AnOwnerOfACopyHasAHigherEpochThanThatOfTheSource) {
  for (int i = 0; i < 9; ++i) Own(&objects_, absl::ZeroDuration());
  ASSERT_THAT(ToStore(*Open(&objects_), &copy_), IsOk());
  Own(&copy_, absl::InfiniteDuration());
  EXPECT_GT(Seen(&copy_).manifest.epoch, Seen(&objects_).manifest.epoch);
}

TEST_F(CopyStateTest, AServerBeginsOnACopyAtOnce) {
  const std::unique_ptr<StateBucket> source =
      Own(&objects_, absl::InfiniteDuration());
  Server server(source.get());
  server.Add(1);
  ASSERT_THAT(ToStore(*Open(&objects_), &copy_), IsOk());
  const std::unique_ptr<StateBucket> owner =
      Own(&copy_, absl::InfiniteDuration());
  EXPECT_THAT(VerifyState(*owner), IsOk());
  // The source is still its owner's.
  EXPECT_THAT(source->owner()->Beat(), IsOk());
}

// The images of a copy have the names of another store's epochs. An owner of
// the copy must not make such a name again, and removes them when nothing names
// them.
TEST_F(CopyStateTest, AnOwnerOfACopyMakesNoImageOfTheSourceAgainAndCutsThem) {
  // By a clock that is wrong, a store may have high epochs.
  const uint64_t high = uint64_t{1} << 60;
  for (const uint64_t epoch : {uint64_t{1}, high}) {
    MemoryObjects objects;
    MemoryObjects copy;
    Own(&objects, absl::ZeroDuration());
    Manifest manifest = Seen(&objects).manifest;
    manifest.epoch = epoch;
    objects.objects[LogKeys().Manifest()].bytes = EncodeManifest(manifest);
    const std::unique_ptr<StateBucket> source =
        Own(&objects, absl::ZeroDuration());
    Server server(source.get());
    const std::string old = server.Add(1);
    EXPECT_EQ(old, absl::StrCat("e", epoch + 1, "-0"));
    ASSERT_THAT(ToStore(*Open(&objects), &copy), IsOk());

    const std::unique_ptr<StateBucket> owner =
        Own(&copy, absl::InfiniteDuration());
    EXPECT_GT(owner->owner()->epoch(), epoch + 1);
    Server next(owner.get(), server.next());
    const std::string image = next.Add(7);
    EXPECT_EQ(ValueOf(*owner, image), 7);
    EXPECT_EQ(ValueOf(*owner, old), 1);
    next.Snap();
    EXPECT_THAT(Keys(&copy, "logs/0/images/"), ElementsAre(image));
  }
}

TEST_F(CopyStateTest, ImagesOfAFolderAreCutInAStore) {
  const std::unique_ptr<StateFolder> folder = files_.Open();
  Server server(folder.get());
  const std::string old = server.Add(1);
  ASSERT_THAT(ToStore(*folder, &copy_), IsOk());
  EXPECT_THAT(Keys(&copy_, "logs/0/images/"), ElementsAre(old));
  const std::unique_ptr<StateBucket> owner =
      Own(&copy_, absl::InfiniteDuration());
  Server next(owner.get(), server.next());
  next.Snap();
  EXPECT_THAT(Keys(&copy_, "logs/0/images/"), IsEmpty());
  EXPECT_THAT(VerifyState(*owner), IsOk());
}

TEST_F(CopyStateTest, APrefixWithObjectsIsLeftAlone) {
  const std::unique_ptr<StateFolder> folder = files_.Open();
  for (const std::string key : {"FORMAT", "photo.jpg", "checkpoints/a/b"}) {
    MemoryObjects objects;
    ASSERT_THAT(MemoryStore(&objects).Create(key, {"x"}), IsOk());
    EXPECT_THAT(ToStore(*folder, &objects),
                IsStatus(absl::StatusCode::kFailedPrecondition, key));
    EXPECT_THAT(Keys(&objects, ""), ElementsAre(key));
  }
}

// Whatever request is the last one, what is there is a whole copy or no state.
TEST_F(CopyStateTest, APartOfACopyIsNoState) {
  const std::unique_ptr<StateFolder> folder = files_.Open();
  Server server(folder.get());
  server.Add(1);
  server.Snap();
  server.Add(2);
  bool copied = false;
  int failures = 0;
  for (int last = 0; !copied; ++last) {
    ASSERT_LT(last, 40);
    MemoryObjects objects;
    objects.fate = [left = last](const auto&, const auto&) mutable {
      return left-- > 0 ? MemoryObjects::Fate::kGood
                        : MemoryObjects::Fate::kRefused;
    };
    copied = ToStore(*folder, &objects).ok();
    objects.fate = nullptr;
    if (copied) break;
    ++failures;
    EXPECT_FALSE(objects.objects.contains("FORMAT")) << last;
    EXPECT_THAT(StateBucket::Open(std::make_unique<MemoryStore>(&objects),
                                  std::nullopt, false)
                    .status(),
                IsStatus(absl::StatusCode::kNotFound, "has no state"));
    if (objects.objects.contains(LogKeys().Manifest())) {
      EXPECT_THAT(StateBucket::Open(std::make_unique<MemoryStore>(&objects),
                                    kModel, false)
                      .status(),
                  IsStatus(absl::StatusCode::kDataLoss, "FORMAT is missing"));
    }
  }
  EXPECT_GT(failures, 8);
}

// At each request of a copy or a check, the server writes a snapshot and
// removes what it replaces.
TEST_F(CopyStateTest, ASnapshotDuringAReadIsNoDamage) {
  const auto copy = [this](const State& from) {
    MemoryObjects to;
    const auto copied = ToStore(from, &to);
    if (!copied.ok()) return copied.status();
    const std::unique_ptr<StateBucket> opened = Open(&to);
    const auto report = VerifyState(*opened);
    if (!report.ok()) return report.status();
    // The tries before the last one have left nothing.
    EXPECT_EQ(Keys(&to, "logs/0/images/").size(), report->images);
    EXPECT_LE(Keys(&to, "logs/0/snapshots/").size(), 1);
    return absl::OkStatus();
  };
  const auto verify = [](const State& from) {
    return VerifyState(from).status();
  };
  for (const std::function<absl::Status(const State&)>& read :
       {std::function(copy),
        std::function<absl::Status(const State&)>(verify)}) {
    bool interrupted = true;
    for (int at = 0; interrupted; ++at) {
      MemoryObjects objects;
      const std::unique_ptr<StateBucket> state =
          Own(&objects, absl::ZeroDuration());
      Server server(state.get());
      server.Add(1);
      server.Snap();
      for (int i = 2; i < 5; ++i) server.Add(static_cast<float>(i));
      const std::unique_ptr<StateBucket> reader = Open(&objects);
      interrupted = false;
      std::atomic<int> left = at;
      objects.before = [&](const auto&, const auto&) {
        if (left-- != 0) return;
        interrupted = true;
        server.RemoveAll();
        server.Add(9);
        server.Snap();
      };
      EXPECT_THAT(read(*reader), IsOk()) << at;
      objects.before = nullptr;
    }
  }
}

TEST_F(CopyStateTest, DamageIsNamed) {
  const std::unique_ptr<StateBucket> state =
      Own(&objects_, absl::ZeroDuration());
  Server server(state.get());
  const std::string image = server.Add(1);
  server.Snap();
  server.Add(2);
  server.Add(3);
  const std::string snapshot = Keys(&objects_, "logs/0/snapshots/").at(0);
  for (const std::string& key :
       {"logs/0/images/" + image, "logs/0/snapshots/" + snapshot,
        LogKeys().OfPlace(3)}) {
    const store::Object object = objects_.objects.at(key);
    objects_.objects.erase(key);
    const std::string name = key.substr(key.rfind('/') + 1);
    EXPECT_THAT(VerifyState(*Open(&objects_)),
                IsStatus(absl::StatusCode::kDataLoss, name));
    MemoryObjects to;
    EXPECT_THAT(ToStore(*Open(&objects_), &to),
                IsStatus(absl::StatusCode::kDataLoss, name));
    EXPECT_THAT(CopyToFolder(*Open(&objects_), files_.path()),
                IsStatus(absl::StatusCode::kDataLoss, name));
    EXPECT_FALSE(fs::exists(files_.path() + ".partial"));
    objects_.objects[key] = object;
  }
  EXPECT_THAT(VerifyState(*Open(&objects_)), IsOk());
}

TEST_F(CopyStateTest, ReadingAFolderWritesNothing) {
  {
    const std::unique_ptr<StateFolder> folder = files_.Open();
    Server(folder.get()).Add(1);
  }
  fs::remove(files_.path() + "/LOCK");
  const auto source = StateFolder::OpenToRead(files_.path());
  ASSERT_THAT(source, IsOk());
  EXPECT_THAT(VerifyState(**source), IsOk());
  EXPECT_FALSE(fs::exists(files_.path() + "/LOCK"));
  EXPECT_THAT(StateFolder::OpenToRead(files_.path() + ".none").status(),
              IsStatus(absl::StatusCode::kNotFound, ""));
}

}  // namespace
}  // namespace weft::log
