// Tests a state with several logs in one store: each has another owner, and
// what happens to one changes nothing of the others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "src/log/bucket/log_keys.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/state_bucket.h"
#include "tests/log/bucket_process.h"
#include "tests/log/journal_folder.h"
#include "tests/support/memory_store.h"
#include "tests/support/status_matchers.h"

namespace weft::log {
namespace {

using store::MemoryObjects;
using store::MemoryStore;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Fate = MemoryObjects::Fate;

constexpr absl::Duration kForEver = absl::InfiniteDuration();
constexpr absl::Duration kAtOnce = absl::ZeroDuration();

class ManyLogsTest : public ::testing::Test {
 protected:
  // A process that takes one of two logs. After `patience` an owner is dead.
  std::unique_ptr<Process> Member(const std::string& name,
                                  absl::Duration patience = kForEver) {
    return std::make_unique<Process>(&objects_, name, patience, 2);
  }

  std::unique_ptr<StateBucket> Reader() {
    return StateBucket::Open(std::make_unique<MemoryStore>(&objects_),
                             std::nullopt, false)
        .value();
  }

  // Returns the letters of a log's records.
  std::string Found(int log) {
    Process reader(&objects_, "reader");
    EXPECT_THAT(reader.state->SelectLog(log), IsOk());
    EXPECT_THAT(reader.Read(), IsOk());
    return reader.found;
  }

  // Returns the objects below a prefix, each with its ETag.
  std::map<std::string, std::string> Below(const std::string& prefix) {
    std::map<std::string, std::string> below;
    for (const auto& [key, object] : objects_.objects) {
      if (absl::StartsWith(key, prefix)) below[key] = object.etag;
    }
    return below;
  }

  MemoryObjects objects_;
};

TEST_F(ManyLogsTest, EachLogHasAnotherOwner) {
  const auto a = Member("a");
  ASSERT_THAT(a->Start(), IsOk());
  const auto b = Member("b");
  ASSERT_THAT(b->Start(), IsOk());
  EXPECT_EQ(a->log_number(), 0);
  EXPECT_EQ(b->log_number(), 1);
  EXPECT_THAT(Member("c")->TryTake(), IsOkAndHolds(false));
  ASSERT_THAT(a->Write("aa"), IsOk());
  ASSERT_THAT(b->Write("b"), IsOk());
  ASSERT_THAT(a->Write("a"), IsOk());
  EXPECT_EQ(Found(0), "aaa");
  EXPECT_EQ(Found(1), "b");
  EXPECT_THAT(a->state->owner()->Beat(), IsOk());
  EXPECT_THAT(b->state->owner()->Beat(), IsOk());
}

TEST_F(ManyLogsTest, AStandbyNamesAnOwnerThatLives) {
  const auto a = Member("a");
  ASSERT_THAT(a->Start(), IsOk());
  const auto b = Member("b");
  ASSERT_THAT(b->Start(), IsOk());
  std::set<std::string> named;
  for (int i = 0; i < 20; ++i) {
    const auto standby = Member(absl::StrCat("standby-", i));
    ASSERT_THAT(standby->TryTake(), IsOkAndHolds(false));
    named.insert(standby->state->seen().owner.name);
  }
  EXPECT_THAT(named, UnorderedElementsAre("a", "b"));
  // Nobody may be sent to one that has ended.
  ASSERT_THAT(a->state->Release(/*drained=*/false), IsOk());
  for (int i = 0; i < 20; ++i) {
    const auto next = Member(absl::StrCat("next-", i));
    ASSERT_THAT(next->TryTake(), IsOkAndHolds(true));
    EXPECT_EQ(next->state->seen().owner.name, "b");
    ASSERT_THAT(next->state->Release(/*drained=*/false), IsOk());
  }
}

TEST_F(ManyLogsTest, ARestartInPlaceTakesItsOwnLog) {
  ASSERT_THAT(Member("a")->Start(), IsOk());
  const auto b = Member("b");
  ASSERT_THAT(b->Start(), IsOk());
  ASSERT_THAT(b->Write("b"), IsOk());
  const auto a = Member("a");
  ASSERT_THAT(a->Start(), IsOk());
  EXPECT_EQ(a->log_number(), 0);
  // Log 0 is free, and log 1 seems to be another process's.
  ASSERT_THAT(a->state->Release(/*drained=*/false), IsOk());
  const auto again = Member("b");
  ASSERT_THAT(again->Start(), IsOk());
  EXPECT_EQ(again->log_number(), 1);
  EXPECT_EQ(again->found, "b");
}

TEST_F(ManyLogsTest, AReleasedLogComesBeforeOneOfADeadOwner) {
  const auto a = Member("a");
  ASSERT_THAT(a->Start(), IsOk());
  const auto b = Member("b");
  ASSERT_THAT(b->Start(), IsOk());
  ASSERT_THAT(b->state->Release(/*drained=*/false), IsOk());
  const auto c = Member("c", kAtOnce);
  ASSERT_THAT(c->Start(), IsOk());
  EXPECT_EQ(c->log_number(), 1);
  const auto d = Member("d", kAtOnce);
  ASSERT_THAT(d->Start(), IsOk());
  EXPECT_EQ(d->log_number(), 0);
  EXPECT_THAT(a->Write("a"), IsStatus(absl::StatusCode::kAborted, "d has"));
}

// At each request of a process that begins, another one begins, too.
TEST_F(ManyLogsTest, ATakeThatIsLostGoesOnWithTheOtherLog) {
  bool lost = false;
  for (int at = 0; at < 9; ++at) {
    for (const absl::Duration patience : {kForEver, kAtOnce}) {
      objects_.objects.clear();
      const auto one = Member("a");
      const auto two = Member("b", patience);
      std::atomic<int> left = at;  // Requests come from several threads.
      objects_.before = [&](const auto&, const auto&) {
        if (left-- != 0) return;
        EXPECT_THAT(two->TryTake(), IsOkAndHolds(true));
      };
      const absl::StatusOr<bool> taken = one->TryTake();
      objects_.before = nullptr;
      ASSERT_THAT(taken, IsOkAndHolds(true)) << at;
      if (two->state->owner() == nullptr) continue;  // It has ended before.
      EXPECT_NE(one->log_number(), two->log_number()) << at;
      lost = lost || one->log_number() == 1;
      ASSERT_THAT(one->Read(), IsOk());
      ASSERT_THAT(two->Read(), IsOk());
      EXPECT_THAT(one->Write("1"), IsOk()) << at;
      EXPECT_THAT(two->Write("2"), IsOk()) << at;
    }
  }
  EXPECT_TRUE(lost);
}

// A manifest may name the process, so it must not take another log.
TEST_F(ManyLogsTest, ATakeWhoseAnswerIsLostGoesOnWithTheSameLog) {
  const auto a = Member("a");
  objects_.fate = [](const auto&, const std::string& key) {
    return absl::StartsWith(key, "logs/") ? Fate::kRefused : Fate::kGood;
  };
  EXPECT_THAT(a->TryTake(), IsStatus(absl::StatusCode::kUnavailable, ""));
  objects_.fate = nullptr;
  ASSERT_THAT(a->Start(), IsOk());
  EXPECT_EQ(a->log_number(), 0);
  EXPECT_FALSE(objects_.objects.contains("owners/1"));
}

TEST_F(ManyLogsTest, NobodyTakesADrainedLog) {
  const auto a = Member("a");
  ASSERT_THAT(a->Start(), IsOk());
  const auto b = Member("b");
  ASSERT_THAT(b->Start(), IsOk());
  ASSERT_THAT(b->Write("b"), IsOk());
  ASSERT_THAT(b->state->Release(/*drained=*/true), IsOk());
  // Neither its last owner, nor one for which each owner is dead.
  for (const std::string name : {"b", "c"}) {
    const auto next = Member(name, kForEver);
    EXPECT_THAT(next->TryTake(), IsOkAndHolds(false));
    EXPECT_EQ(next->state->seen().owner.name, "a");
  }
  // So fewer logs are enough.
  EXPECT_THAT(Reader()->CheckLogs(1), IsOk());
  MemoryStore store(&objects_);
  ASSERT_THAT(Undrain(store, {.log = 1}), IsOk());
  ASSERT_THAT(Undrain(store, {.log = 1}), IsOk());
  EXPECT_THAT(Reader()->CheckLogs(1),
              IsStatus(absl::StatusCode::kFailedPrecondition, "owners/1"));
  const auto c = Member("c");
  ASSERT_THAT(c->Start(), IsOk());
  EXPECT_EQ(c->log_number(), 1);
  EXPECT_EQ(c->found, "b");
}

TEST_F(ManyLogsTest, TooFewLogsAreRefused) {
  for (int log = 0; log < 11; ++log) {
    Process owner(&objects_, absl::StrCat("m", log), kForEver, log + 1);
    ASSERT_THAT(owner.Start(), IsOk());
    ASSERT_EQ(owner.log_number(), log);
  }
  const auto reader = Reader();
  for (const int logs : {1, 10}) {
    const absl::Status refused = reader->CheckLogs(logs);
    EXPECT_THAT(refused, IsStatus(absl::StatusCode::kFailedPrecondition,
                                  absl::StrCat("--logs=", logs, ": ")));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("owners/10, "));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("--logs=11"));
  }
  EXPECT_THAT(reader->CheckLogs(11), IsOk());
  EXPECT_THAT(reader->CheckLogs(12), IsOk());
}

TEST_F(ManyLogsTest, AReaderOfSeveralLogsMustNameOne) {
  const auto a = Member("a");
  ASSERT_THAT(Reader()->SelectLog(std::nullopt), IsOk());
  ASSERT_THAT(a->Start(), IsOk());
  EXPECT_THAT(Reader()->ListLogs().value(), ElementsAre(0));
  ASSERT_THAT(Reader()->SelectLog(std::nullopt), IsOk());
  EXPECT_THAT(Reader()->SelectLog(1),
              IsStatus(absl::StatusCode::kNotFound, "the logs 0, and not 1"));
  const auto b = Member("b");
  ASSERT_THAT(b->Start(), IsOk());
  EXPECT_THAT(Reader()->SelectLog(std::nullopt),
              IsStatus(absl::StatusCode::kFailedPrecondition, "the logs 0, 1"));
  ASSERT_THAT(a->Write("a"), IsOk());
  ASSERT_THAT(b->Write("bb"), IsOk());
  EXPECT_EQ(Found(0), "a");
  EXPECT_EQ(Found(1), "bb");
}

TEST_F(ManyLogsTest, ACutOfOneLogRemovesNothingOfTheOther) {
  const auto a = Member("a");
  ASSERT_THAT(a->Start(), IsOk());
  const auto b = Member("b");
  ASSERT_THAT(b->Start(), IsOk());
  for (Process* process : {a.get(), b.get()}) {
    const std::string image = process->state->NewImageName();
    ASSERT_THAT(process->state->CreateImage(image, {"image"}), IsOk());
    for (const std::string letters : {"12", "3", "4"}) {
      ASSERT_THAT(process->Write(letters), IsOk());
    }
  }
  for (const auto& [cut, other] :
       {std::pair(a.get(), "logs/1/"), std::pair(b.get(), "logs/0/")}) {
    const auto before = Below(other);
    ASSERT_THAT(cut->Snapshot(), IsOk());
    EXPECT_EQ(Below(other), before);
  }
  EXPECT_EQ(Found(0), "1234");
  EXPECT_EQ(Found(1), "1234");
  EXPECT_TRUE(Below("logs/1/images/").empty());
  EXPECT_EQ(Below("logs/1/snapshots/").size(), 1);
}

TEST_F(ManyLogsTest, ADamagedLogKeepsNobodyFromTheOther) {
  const auto a = Member("a");
  ASSERT_THAT(a->Start(), IsOk());
  ASSERT_THAT(a->Write("a"), IsOk());
  ASSERT_THAT(a->Write("b"), IsOk());
  ASSERT_THAT(a->state->Release(/*drained=*/false), IsOk());
  objects_.objects.erase(LogKeys().OfPlace(2));
  for (const bool damage_manifest : {false, true}) {
    if (damage_manifest) objects_.objects["owners/0"].bytes = "{}";
    const auto b = Member("b");
    ASSERT_THAT(b->Start(), IsOk());
    EXPECT_EQ(b->log_number(), 1);
    // Another one waits for log 1.
    const auto c = Member("c");
    EXPECT_THAT(c->TryTake(), IsOkAndHolds(false));
    EXPECT_EQ(c->state->seen().owner.name, "b");
    ASSERT_THAT(b->state->Release(/*drained=*/false), IsOk());
    EXPECT_THAT(c->TryTake(), IsOkAndHolds(true));
    ASSERT_THAT(c->state->Release(/*drained=*/false), IsOk());
  }
  objects_.objects["owners/1"].bytes = "{}";
  EXPECT_THAT(Member("d")->TryTake(),
              IsStatus(absl::StatusCode::kDataLoss, "owners/1"));
}

// Checkpoints that were copied with log 0 have epochs of another state's logs.
TEST_F(ManyLogsTest, ANewLogBeginsAfterTheEpochsOfAllOthers) {
  for (int i = 0; i < 5; ++i) ASSERT_THAT(Member("a")->Start(), IsOk());
  const auto b = Member("b");
  ASSERT_THAT(b->Start(), IsOk());
  EXPECT_EQ(b->log_number(), 1);
  EXPECT_EQ(b->state->owner()->epoch(), 6);
}

TEST_F(ManyLogsTest, OneLogNeedsNoRequestMore) {
  std::vector<std::string> requests;
  Process owner(&objects_, "a");
  Process standby(&objects_, "b", kForEver);
  objects_.before = [&](const std::string& operation, const std::string& key) {
    requests.push_back(absl::StrCat(operation, " ", key));
  };
  ASSERT_THAT(owner.TryTake(), IsOkAndHolds(true));
  EXPECT_THAT(requests,
              ElementsAre("get owners/0", "list logs/0/records/",
                          "create owners/0", "list logs/0/records/",
                          "create logs/0/records/00000000000000000001",
                          "get owners/0"));
  requests.clear();
  EXPECT_THAT(standby.TryTake(), IsOkAndHolds(false));
  EXPECT_THAT(requests, ElementsAre("get owners/0"));
}

TEST(LogKeysTest, OnlyAManifestHasALog) {
  EXPECT_EQ(LogOfManifest("owners/0"), 0);
  EXPECT_EQ(LogOfManifest("owners/12"), 12);
  for (const std::string key :
       {"owners/", "owners/01", "owners/-1", "owners/a", "owners/1/2",
        "owners/ 1", "owners/99999999999", "logs/1", "1"}) {
    EXPECT_EQ(LogOfManifest(key), std::nullopt) << key;
  }
  const LogKeys keys{.log = 12};
  EXPECT_EQ(keys.PlaceOf(keys.OfPlace(7)), 7);
  EXPECT_EQ(keys.PlaceOf(LogKeys{.log = 1}.OfPlace(7)), 0);
}

}  // namespace
}  // namespace weft::log
