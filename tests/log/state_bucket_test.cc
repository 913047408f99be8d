#include "src/log/bucket/state_bucket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "prometheus/registry.h"
#include "src/log/bucket/log_object.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/manifest.h"
#include "src/log/image.h"
#include "tests/log/bucket_process.h"
#include "tests/log/journal_folder.h"
#include "tests/support/memory_store.h"
#include "tests/support/status_matchers.h"

namespace weft::log {
namespace {

using store::MemoryObjects;
using store::MemoryStore;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Fate = MemoryObjects::Fate;

const LogKeys kKeys;

class StateBucketTest : public ::testing::Test {
 protected:
  std::vector<std::string> Keys(const std::string& prefix) {
    std::vector<std::string> keys;
    const auto objects =
        MemoryStore(&objects_).List(prefix, "", store::kAllObjects).value();
    for (const store::ListedObject& object : objects) {
      keys.push_back(object.key.substr(prefix.size()));
    }
    return keys;
  }
  // What a start finds.
  std::string Found() {
    Process process(&objects_, "reader");
    EXPECT_THAT(process.Read(), IsOk());
    return process.found;
  }

  MemoryObjects objects_;
};

TEST_F(StateBucketTest, ARestartFindsWhatWasWritten) {
  Process first(&objects_, "a");
  ASSERT_THAT(first.Start(), IsOk());
  EXPECT_EQ(first.found, "");
  ASSERT_THAT(first.Write("ab"), IsOk());
  ASSERT_THAT(first.Write("c"), IsOk());
  Process second(&objects_, "a", absl::InfiniteDuration());
  ASSERT_THAT(second.Start(), IsOk());
  EXPECT_EQ(second.found, "abc");
  EXPECT_EQ(second.state->owner()->epoch(), 2);
  ASSERT_THAT(second.Write("d"), IsOk());
  EXPECT_EQ(Found(), "abcd");
}

// A start reads the log while clients work, and goes on after an outage. There
// are more objects than a reader reads ahead in three times.
TEST_F(StateBucketTest, AReaderGoesOnWhereTheStoreWentAway) {
  Process first(&objects_, "a");
  ASSERT_THAT(first.Start(), IsOk());
  std::string written;
  for (char letter = 'A'; letter <= 'z'; ++letter) {
    written += letter;
    ASSERT_THAT(first.Write(std::string(1, letter)), IsOk());
  }
  const auto reader = first.state->OpenLog(1).value();
  std::string read;
  for (const absl::Status& away :
       {absl::UnavailableError("away"), absl::DeadlineExceededError("slow")}) {
    read += (*reader->Next())->bytes;
    {
      MutexLock lock(&objects_.mu);
      objects_.read_error = away;
    }
    // What was read ahead is there.
    absl::StatusOr<std::optional<LogReader::Record>> next = reader->Next();
    for (; next.ok() && *next; next = reader->Next()) read += (*next)->bytes;
    EXPECT_EQ(next.status(), away);
    EXPECT_EQ(reader->Next().status(), away);
    MutexLock lock(&objects_.mu);
    objects_.read_error = absl::OkStatus();
  }
  while (true) {
    while (!reader->IsReady(absl::Milliseconds(1))) {
    }
    const auto next = reader->Next();
    ASSERT_THAT(next, IsOk());
    if (!*next) break;
    read += (*next)->bytes;
  }
  EXPECT_EQ(read, written);
}

TEST_F(StateBucketTest, AReaderSaysWhetherItWouldWait) {
  Process first(&objects_, "a");
  ASSERT_THAT(first.Start(), IsOk());
  ASSERT_THAT(first.Write("a"), IsOk());
  std::atomic<bool> held = true;
  objects_.before = [&held](const std::string& what, const std::string&) {
    while (what == "get" && held) std::this_thread::yield();
  };
  const auto reader = first.state->OpenLog(1).value();
  EXPECT_FALSE(reader->IsReady(absl::Milliseconds(1)));
  held = false;
  EXPECT_TRUE(reader->IsReady(absl::Minutes(1)));
  EXPECT_EQ((*reader->Next())->bytes, "a");
  EXPECT_TRUE(reader->IsReady(absl::Minutes(1)));
  EXPECT_THAT(reader->Next(), IsOkAndHolds(std::nullopt));
}

// A process that saw no answer to its beats does not try image after image.
TEST_F(StateBucketTest, ImagesFailAtOnceWhileTheStoreDoesNotAnswer) {
  Process first(&objects_, "a");
  ASSERT_THAT(first.Start(), IsOk());
  std::atomic<bool> away = false;
  std::atomic<int> requests = 0;
  objects_.fate = [&](const std::string& what, const std::string&) {
    if (what != "swap") ++requests;
    return away ? Fate::kRefused : Fate::kGood;
  };
  prometheus::Registry registry;
  OwnerMetrics metrics(&registry);
  first.state->StartBeats(&metrics);
  const std::string name = first.state->NewImageName();
  EXPECT_TRUE(first.state->answers());
  ASSERT_THAT(first.state->CreateImage(name, {"bytes"}), IsOk());
  away = true;
  requests = 0;
  const absl::Time limit = absl::Now() + absl::Minutes(1);
  while (first.state->answers() && absl::Now() < limit) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  using absl::StatusCode::kUnavailable;
  EXPECT_EQ(first.state->CreateImage("other", {"b"}).code(), kUnavailable);
  EXPECT_EQ(first.state->OpenImage(name).status().code(), kUnavailable);
  EXPECT_EQ(first.state->RemoveImage(name).code(), kUnavailable);
  EXPECT_EQ(requests, 0);
  away = false;
  while (!first.state->answers() && absl::Now() < limit) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_THAT(first.state->OpenImage(name).status(), IsOk());
}

TEST_F(StateBucketTest, AnOwnerThatLivesIsLeftAlone) {
  Process first(&objects_, "a");
  ASSERT_THAT(first.Start(), IsOk());
  Process second(&objects_, "b", absl::InfiniteDuration());
  EXPECT_THAT(second.TryTake(), IsOkAndHolds(false));
  EXPECT_EQ(second.state->seen().owner.name, "a");
  ASSERT_THAT(first.state->owner()->Release(), IsOk());
  EXPECT_THAT(second.TryTake(), IsOkAndHolds(true));
}

TEST(LogWatchTest, AnOwnerIsDeadWhenItsManifestStaysTheSame) {
  LogWatch watch({.name = "b"}, absl::Seconds(5), absl::Seconds(4));
  SeenManifest seen{.etag = "1"};
  seen.manifest.owner.name = "a";
  const absl::Time start = absl::UnixEpoch();
  EXPECT_EQ(watch.Look(seen, start), LogClaim::kNone);
  EXPECT_EQ(watch.Look(seen, start + absl::Seconds(4)), LogClaim::kNone);
  seen.etag = "2";  // A beat.
  EXPECT_EQ(watch.Look(seen, start + absl::Seconds(6)), LogClaim::kNone);
  EXPECT_EQ(watch.Look(seen, start + absl::Seconds(10)), LogClaim::kNone);
  EXPECT_EQ(watch.Look(seen, start + absl::Seconds(11)),
            LogClaim::kOwnerIsDead);
}

TEST(LogWatchTest, NobodyIsDeadBecauseTheStoreWasAway) {
  LogWatch watch({.name = "b"}, absl::Seconds(5), absl::Seconds(3));
  SeenManifest seen{.etag = "1"};
  seen.manifest.owner.name = "a";
  const absl::Time start = absl::UnixEpoch();
  EXPECT_EQ(watch.Look(seen, start), LogClaim::kNone);
  EXPECT_EQ(watch.Look(seen, start + absl::Seconds(20)), LogClaim::kNone);
  EXPECT_EQ(watch.Look(seen, start + absl::Seconds(22)), LogClaim::kNone);
  EXPECT_EQ(watch.Look(seen, start + absl::Seconds(24)), LogClaim::kNone);
  EXPECT_EQ(watch.Look(seen, start + absl::Seconds(25)),
            LogClaim::kOwnerIsDead);
}

TEST_F(StateBucketTest, AFencedOwnerCanWriteNothing) {
  Process zombie(&objects_, "a");
  ASSERT_THAT(zombie.Start(), IsOk());
  ASSERT_THAT(zombie.Write("a"), IsOk());
  Process owner(&objects_, "b");
  ASSERT_THAT(owner.Start(), IsOk());
  for (int i = 0; i < 50; ++i) ASSERT_THAT(owner.Write("b"), IsOk());
  ASSERT_THAT(owner.Snapshot(), IsOk());
  // The place at which the zombie goes on has a seal, also after the cut.
  EXPECT_THAT(zombie.Write("z"), IsStatus(absl::StatusCode::kAborted,
                                          "instance b has taken the log over"));
  EXPECT_THAT(zombie.state->owner()->fenced(),
              IsStatus(absl::StatusCode::kAborted, ""));
  EXPECT_EQ(Found(), "a" + std::string(50, 'b'));
}

TEST_F(StateBucketTest, AFencedOwnerNeitherBeatsNorNamesNorCuts) {
  Process zombie(&objects_, "a");
  ASSERT_THAT(zombie.Start(), IsOk());
  ASSERT_THAT(zombie.Write("abc"), IsOk());
  Process owner(&objects_, "b");
  ASSERT_THAT(owner.Start(), IsOk());
  ASSERT_THAT(owner.state->CreateImage("e2-7", {"image"}), IsOk());
  EXPECT_THAT(zombie.Snapshot(), IsStatus(absl::StatusCode::kAborted, ""));
  EXPECT_THAT(zombie.state->owner()->Beat(),
              IsStatus(absl::StatusCode::kAborted, ""));
  EXPECT_EQ(Found(), "abc");
  EXPECT_THAT(Keys("logs/0/images/"), ElementsAre("e2-7"));
}

TEST_F(StateBucketTest, TwoProcessesWithOneNameAreToldSo) {
  Process first(&objects_, "a");
  ASSERT_THAT(first.Start(), IsOk());
  Process second(&objects_, "a");
  ASSERT_THAT(second.Start(), IsOk());
  EXPECT_THAT(first.Write("x"),
              IsStatus(absl::StatusCode::kAborted, "--instance=a"));
}

TEST_F(StateBucketTest, ALostAnswerIsNoSecondRecord) {
  for (const Fate fate : {Fate::kLost, Fate::kRepeated, Fate::kRefused}) {
    MemoryObjects objects;
    Process process(&objects, "a");
    ASSERT_THAT(process.Start(), IsOk());
    objects.fate = [fate, first = true](const auto&, const auto&) mutable {
      return std::exchange(first, false) ? fate : Fate::kGood;
    };
    const absl::Status once = process.Write("ab");
    if (fate != Fate::kRepeated) {
      EXPECT_THAT(once, IsStatus(absl::StatusCode::kUnavailable, ""));
      ASSERT_THAT(process.Write(""), IsOk());
    } else {
      ASSERT_THAT(once, IsOk());
    }
    ASSERT_THAT(process.Write("c"), IsOk());
    Process next(&objects, "a");
    ASSERT_THAT(next.Start(), IsOk());
    EXPECT_EQ(next.found, "abc");
  }
}

TEST_F(StateBucketTest, ALateSealOfAnEarlierEpochOnlyTakesAPlace) {
  Process process(&objects_, "a");
  ASSERT_THAT(process.Start(), IsOk());
  ASSERT_THAT(process.Write("a"), IsOk());
  Process second(&objects_, "a");
  ASSERT_THAT(second.Start(), IsOk());
  // A process that wanted epoch 1 and gave up.
  const uint64_t place = second.state->owner()->first_place();
  ASSERT_THAT(
      MemoryStore(&objects_).Create(kKeys.OfPlace(place), {EncodeSeal(1)}),
      IsOk());
  ASSERT_THAT(second.Write("bc"), IsOk());
  ASSERT_THAT(second.Write("d"), IsOk());
  EXPECT_EQ(Found(), "abcd");
}

TEST_F(StateBucketTest, RecordsOfAnEarlierEpochThanOneBeforeAreVoid) {
  Process first(&objects_, "a");
  ASSERT_THAT(first.Start(), IsOk());
  Process second(&objects_, "b");
  ASSERT_THAT(second.Start(), IsOk());
  ASSERT_THAT(MemoryStore(&objects_).Create(
                  kKeys.OfPlace(second.state->owner()->first_place()),
                  {EncodeLogObject(1, 1, {"z"})}),
              IsOk());
  ASSERT_THAT(second.Write("b"), IsOk());
  EXPECT_EQ(Found(), "b");
}

TEST_F(StateBucketTest, OfTwoThatTakeTheLogOneSucceeds) {
  Process first(&objects_, "a");
  Process second(&objects_, "b");
  // At each request of the first one, the second takes the whole log.
  for (int at = 0; at < 8; ++at) {
    MemoryObjects objects;
    Process one(&objects, "a");
    Process two(&objects, "b");
    bool two_has_it = false;
    objects.before = [&, left = at](const auto&, const auto&) mutable {
      if (left-- != 0) return;
      const auto taken = two.TryTake();
      ASSERT_THAT(taken, IsOk());
      two_has_it = *taken;
    };
    const absl::StatusOr<bool> one_has_it = one.TryTake();
    objects.before = nullptr;
    ASSERT_THAT(one_has_it, IsOk());
    if (!two_has_it) {
      EXPECT_TRUE(*one_has_it) << at;
      continue;
    }
    ASSERT_THAT(two.Read(), IsOk());
    const bool two_writes = two.Write("2").ok();
    if (*one_has_it) {
      ASSERT_THAT(one.Read(), IsOk());
      EXPECT_NE(one.Write("1").ok(), two_writes) << at;
    } else {
      EXPECT_TRUE(two_writes) << at;
    }
  }
}

TEST_F(StateBucketTest, ATakeWhoseAnswersGetLostSucceedsLater) {
  for (int at = 0; at < 2; ++at) {  // The manifest, the seal.
    MemoryObjects objects;
    Process process(&objects, "a");
    objects.fate = [left = at](const auto&, const auto&) mutable {
      return left-- == 0 ? Fate::kLost : Fate::kGood;
    };
    if (!process.Start().ok()) {
      ASSERT_THAT(process.Start(), IsOk()) << at;
    }
    ASSERT_THAT(process.Write("a"), IsOk());
    Process next(&objects, "a");
    ASSERT_THAT(next.Start(), IsOk());
    EXPECT_EQ(next.found, "a");
  }
}

TEST_F(StateBucketTest, ASnapshotCutsTheLogButNoSeal) {
  Process first(&objects_, "a");
  ASSERT_THAT(first.Start(), IsOk());
  ASSERT_THAT(first.Write("a"), IsOk());
  ASSERT_THAT(first.Write("b"), IsOk());
  Process second(&objects_, "b");
  ASSERT_THAT(second.Start(), IsOk());
  ASSERT_THAT(second.Write("c"), IsOk());
  ASSERT_THAT(second.Write("d"), IsOk());
  for (const std::string name : {"e1-0", "e2-0", "e3-0", "other"}) {
    ASSERT_THAT(second.state->CreateImage(name, {"image"}), IsOk());
  }
  ASSERT_THAT(second.Snapshot({"e1-0"}), IsOk());
  // The seals, and the last object.
  EXPECT_THAT(Keys(kKeys.Records()),
              ElementsAre("00000000000000000001", "00000000000000000004",
                          "00000000000000000006"));
  EXPECT_THAT(Keys("logs/0/images/"), ElementsAre("e1-0", "e3-0"));
  EXPECT_THAT(Keys("logs/0/snapshots/"), ElementsAre("e2-5"));
  ASSERT_THAT(second.Write("e"), IsOk());
  EXPECT_EQ(Found(), "abcde");
  ASSERT_THAT(second.Snapshot(), IsOk());
  EXPECT_THAT(Keys("logs/0/snapshots/"), ElementsAre("e2-6"));
  EXPECT_EQ(Found(), "abcde");
}

TEST(SegmentPlacesTest, ASnapshotWaitsForTheRecordsBeforeIt) {
  SegmentPlaces places;
  places.Add(1, 2);
  EXPECT_THAT(places.Wait(9, absl::Milliseconds(1)),
              IsStatus(absl::StatusCode::kUnavailable, "not in the store yet"));
  std::thread log([&places] { places.Add(9, 4); });
  EXPECT_THAT(places.Wait(9, absl::Minutes(1)), IsOkAndHolds(4));
  log.join();
}

TEST_F(StateBucketTest, ASnapshotWhoseAnswerIsLostStaysGood) {
  for (const std::string operation : {"create", "swap"}) {
    MemoryObjects objects;
    Process process(&objects, "a");
    ASSERT_THAT(process.Start(), IsOk());
    ASSERT_THAT(process.Write("ab"), IsOk());
    objects.fate = [&](const std::string& now, const auto&) {
      return now == operation ? Fate::kLost : Fate::kGood;
    };
    EXPECT_THAT(process.Snapshot(),
                IsStatus(absl::StatusCode::kUnavailable, ""));
    objects.fate = nullptr;
    ASSERT_THAT(process.Write("c"), IsOk());
    ASSERT_THAT(process.state->owner()->Beat(), IsOk());
    ASSERT_THAT(process.Snapshot(), IsOk());
    Process next(&objects, "a");
    ASSERT_THAT(next.Start(), IsOk());
    EXPECT_EQ(next.found, "abc");
  }
}

TEST_F(StateBucketTest, ImagesComeBack) {
  Process process(&objects_, "a");
  ASSERT_THAT(process.Start(), IsOk());
  std::vector<float> large(100'000, 1.5F);
  std::vector<float> small = {1, 2, 3};
  const std::string name = process.state->NewImageName();
  EXPECT_NE(name, process.state->NewImageName());
  ASSERT_THAT(WriteImage(*process.state, name, {small, large, large}), IsOk());
  std::vector<float> read_small(small.size());
  std::vector<float> read_large(large.size());
  std::vector<float> read_last(large.size());
  std::atomic<int> reads = 0;
  objects_.before = [&reads](const std::string& operation, const std::string&) {
    if (operation == "get") ++reads;
  };
  ASSERT_THAT(
      ReadImage(*process.state, name, {read_small, read_large, read_last}),
      IsOk());
  EXPECT_EQ(reads, 2);  // The first bytes, and all others.
  objects_.before = nullptr;
  EXPECT_EQ(read_small, small);
  EXPECT_EQ(read_large, large);
  EXPECT_EQ(read_last, large);
  EXPECT_THAT(CheckImageTable(*process.state, name, 3), IsOk());
  objects_.objects["logs/0/images/" + name].bytes.resize(5000);
  EXPECT_THAT(
      ReadImage(*process.state, name, {read_small, read_large, read_last}),
      IsStatus(absl::StatusCode::kDataLoss, "cut short"));
  ASSERT_THAT(process.state->RemoveImage(name), IsOk());
  EXPECT_THAT(CheckImageTable(*process.state, name, 3),
              IsStatus(absl::StatusCode::kDataLoss, "missing"));
}

TEST_F(StateBucketTest, TablesOfImagesAreReadAtOnce) {
  Process process(&objects_, "a");
  ASSERT_THAT(process.Start(), IsOk());
  const std::vector<float> block = {1, 2, 3};
  std::vector<ImageShape> images;
  for (int i = 0; i < 20; ++i) {
    images.push_back({.name = process.state->NewImageName(), .num_blocks = 1});
    ASSERT_THAT(WriteImage(*process.state, images.back().name, {block}),
                IsOk());
  }
  std::atomic<int> reading = 0, most = 0;
  objects_.before = [&](const auto&, const auto&) {
    most = std::max<int>(most, ++reading);
    absl::SleepFor(absl::Milliseconds(5));
    --reading;
  };
  EXPECT_THAT(CheckImageTables(*process.state, images), IsOk());
  EXPECT_GT(most, 1);
  objects_.before = nullptr;
  ASSERT_THAT(process.state->RemoveImage(images[17].name), IsOk());
  EXPECT_THAT(CheckImageTables(*process.state, images),
              IsStatus(absl::StatusCode::kDataLoss, images[17].name));
}

TEST_F(StateBucketTest, WhatIsMissingIsNamed) {
  Process process(&objects_, "a");
  ASSERT_THAT(process.Start(), IsOk());
  for (const std::string letter : {"a", "b", "c"}) {
    ASSERT_THAT(process.Write(letter), IsOk());
  }
  ASSERT_THAT(process.state->CreateImage("e1-0", {"image"}), IsOk());
  ASSERT_THAT(process.Snapshot({"e1-0"}), IsOk());
  for (const std::string letter : {"d", "e", "f"}) {
    ASSERT_THAT(process.Write(letter), IsOk());
  }
  const std::string snapshot = "logs/0/snapshots/e1-4";
  const std::string image = "logs/0/images/e1-0";
  for (const std::string& key :
       {kKeys.OfPlace(6), snapshot, image, kKeys.Manifest()}) {
    const store::Object object = objects_.objects.at(key);
    objects_.objects.erase(key);
    const std::vector<std::string> before = Keys("");
    Process next(&objects_, "a");
    EXPECT_THAT(next.Start(),
                IsStatus(absl::StatusCode::kDataLoss, "memory://" + key));
    // A process that starts again and again leaves nothing.
    EXPECT_EQ(Keys(""), before);
    objects_.objects[key] = object;
  }
  EXPECT_EQ(Found(), "abcdef");
}

TEST_F(StateBucketTest, WhatAnOwnerRemovesIsNotMissing) {
  Process owner(&objects_, "a");
  ASSERT_THAT(owner.Start(), IsOk());
  for (const std::string letter : {"a", "b", "c"}) {
    ASSERT_THAT(owner.Write(letter), IsOk());
  }
  ASSERT_THAT(owner.Snapshot(), IsOk());
  ASSERT_THAT(owner.Write("d"), IsOk());
  Process other(&objects_, "b");
  objects_.before = [&](const std::string& operation, const std::string& key) {
    if (operation != "get" || !absl::StartsWith(key, "logs/")) return;
    objects_.before = nullptr;
    EXPECT_THAT(owner.Snapshot(), IsOk());
  };
  EXPECT_THAT(other.TryTake(), IsOkAndHolds(false));
  ASSERT_THAT(other.Start(), IsOk());
  EXPECT_EQ(other.found, "abcd");
}

TEST_F(StateBucketTest, AnotherModelOrForeignObjectsAreRefused) {
  const auto open = [this](const std::string& model, bool accept = false) {
    return StateBucket::Open(std::make_unique<MemoryStore>(&objects_), model,
                             accept)
        .status();
  };
  ASSERT_THAT(MemoryStore(&objects_).Create("photo.jpg", {"x"}), IsOk());
  EXPECT_THAT(open(kModel),
              IsStatus(absl::StatusCode::kFailedPrecondition, "photo.jpg"));
  EXPECT_THAT(Keys(""), ElementsAre("photo.jpg"));
  ASSERT_THAT(MemoryStore(&objects_).Delete("photo.jpg"), IsOk());
  ASSERT_THAT(open(kModel), IsOk());
  EXPECT_THAT(
      open("Other 0123456789abcdef"),
      IsStatus(absl::StatusCode::kFailedPrecondition, "another base model"));
  ASSERT_THAT(open("Other 0123456789abcdef", true), IsOk());
  EXPECT_THAT(open("Other 0123456789abcdef"), IsOk());
  EXPECT_THAT(StateBucket::Open(std::make_unique<MemoryStore>(&objects_),
                                std::nullopt, false)
                  .status(),
              IsOk());
}

TEST_F(StateBucketTest, TwoProcessesMayBeginAtTheSameTime) {
  std::unique_ptr<StateBucket> other;
  objects_.before = [&](const std::string& operation, const std::string&) {
    if (operation != "list") return;
    objects_.before = nullptr;
    other = StateBucket::Open(std::make_unique<MemoryStore>(&objects_), kModel,
                              false)
                .value();
  };
  EXPECT_THAT(
      StateBucket::Open(std::make_unique<MemoryStore>(&objects_), kModel, false)
          .status(),
      IsOk());
  EXPECT_NE(other, nullptr);
}

TEST_F(StateBucketTest, ALargeGroupIsAnObjectOfItsOwn) {
  Process process(&objects_, "a");
  ASSERT_THAT(process.Start(), IsOk());
  MemoryStore store(&objects_);
  SegmentPlaces places;
  ObjectLogWriter writer(&store, process.state->owner(), &places,
                         /*max_object_bytes=*/200);
  const std::string large(1000, 'x');
  for (const Fate fate : {Fate::kGood, Fate::kLost, Fate::kRepeated}) {
    objects_.fate = [fate, first = true](const auto&, const auto&) mutable {
      return std::exchange(first, false) ? fate : Fate::kGood;
    };
    const absl::Status written =
        writer.WriteGroup(process.next, {large}).status();
    if (fate == Fate::kLost) {
      ASSERT_THAT(written, IsStatus(absl::StatusCode::kUnavailable, ""));
      ASSERT_THAT(writer.WriteGroup(process.next, {large}).status(), IsOk());
    } else {
      ASSERT_THAT(written, IsOk());
    }
    ++process.next;
    process.found += large;
  }
  objects_.fate = nullptr;
  ASSERT_THAT(writer.WriteGroup(process.next++, {"y"}).status(), IsOk());
  process.found += "y";
  EXPECT_THAT(Keys(kKeys.Groups()), ElementsAre("e1-1", "e1-2", "e1-3"));
  EXPECT_EQ(Found(), process.found);
  Process next(&objects_, "a");
  ASSERT_THAT(next.Start(), IsOk());
  EXPECT_EQ(next.found, process.found);
  ASSERT_THAT(next.Snapshot(), IsOk());
  EXPECT_THAT(Keys(kKeys.Groups()), IsEmpty());
  EXPECT_EQ(Found(), process.found);
}

TEST_F(StateBucketTest, AMissingLargeGroupIsNamed) {
  Process process(&objects_, "a");
  ASSERT_THAT(process.Start(), IsOk());
  MemoryStore store(&objects_);
  SegmentPlaces places;
  ObjectLogWriter writer(&store, process.state->owner(), &places, 200);
  ASSERT_THAT(writer.WriteGroup(1, {std::string(1000, 'x')}).status(), IsOk());
  ASSERT_THAT(store.Delete(kKeys.Groups() + "e1-1"), IsOk());
  Process next(&objects_, "a");
  EXPECT_THAT(next.Start(), IsStatus(absl::StatusCode::kDataLoss,
                                     "lacks memory://logs/0/groups/e1-1"));
}

TEST(LogObjectTest, EveryDamagedByteIsFound) {
  const std::string good = EncodeLogObject(7, 3, {"one", "", "three"});
  const auto object = DecodeLogObject(good, "it");
  ASSERT_THAT(object, IsOk());
  EXPECT_EQ(object->epoch, 7);
  EXPECT_EQ(object->first_sequence, 3);
  EXPECT_THAT(object->records, ElementsAre("one", "", "three"));
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] ^= 1;
    EXPECT_THAT(DecodeLogObject(bad, "it"),
                IsStatus(absl::StatusCode::kDataLoss, "it"))
        << at;
    EXPECT_THAT(DecodeLogObject(good.substr(0, at), "it"),
                IsStatus(absl::StatusCode::kDataLoss, ""))
        << at;
  }
  EXPECT_THAT(DecodeLogObject(good + "x", "it"),
              IsStatus(absl::StatusCode::kDataLoss, ""));
  const std::string reference = EncodeReference(7, 3, "logs/0/groups/e7-3");
  EXPECT_EQ(DecodeLogObject(reference, "it")->reference, "logs/0/groups/e7-3");
  for (size_t at = 0; at < reference.size(); ++at) {
    std::string bad = reference;
    bad[at] ^= 1;
    EXPECT_THAT(DecodeLogObject(bad, "it"),
                IsStatus(absl::StatusCode::kDataLoss, ""))
        << at;
  }
  EXPECT_EQ(EncodeSeal(7).size(), LogObject::kSealBytes);
  EXPECT_THAT(DecodeLogObject(EncodeSeal(7), "it")->records, IsEmpty());
}

TEST(ManifestTest, IsReadAsItWasWritten) {
  const Manifest manifest{
      .epoch = 3,
      .version = 9,
      .owner = {.name = "a", .process = "p", .address = "host:1"},
      .released = true,
      .snapshot = {.name = "e3-8", .next_sequence = 8, .place = 5}};
  const auto read = DecodeManifest(EncodeManifest(manifest));
  ASSERT_THAT(read, IsOk());
  EXPECT_EQ(EncodeManifest(*read), EncodeManifest(manifest));
  for (const std::string bad : {"", "{}", "[]", R"({"epoch": 1})"}) {
    EXPECT_THAT(DecodeManifest(bad), IsStatus(absl::StatusCode::kDataLoss, ""));
  }
}

}  // namespace
}  // namespace weft::log
