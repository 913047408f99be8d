#include "src/checkpoint/checkpoint_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/checkpoint/disk_checkpoints.h"
#include "src/checkpoint/object_checkpoints.h"
#include "tests/support/memory_store.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::checkpoint {
namespace {

using nlohmann::json;
using store::MemoryObjects;
using store::MemoryStore;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Fate = MemoryObjects::Fate;

const CheckpointName kName = {.adapter_id = "a", .name = "one"};

DurableFolder Folder(const std::string& weights, int step) {
  return {.files = {{"weights", weights}, {"config", "{}"}},
          .fields = {{"step", step}}};
}

// What both places promise.
class CheckpointFilesTest : public ::testing::TestWithParam<bool> {
 protected:
  CheckpointFilesTest() {
    if (GetParam()) {
      files_ = std::make_unique<ObjectCheckpoints>(
          &store_, 0, 1, [] { return absl::OkStatus(); });
    } else {
      files_ = std::make_unique<DiskCheckpoints>(folder_.path());
    }
  }

  std::vector<std::string> Listed(const std::string& adapter, bool prefix) {
    std::vector<std::string> names;
    const auto listed = files_->List(adapter, prefix).value();
    for (const auto& [name, version] : listed) {
      names.push_back(name.adapter_id + "/" + name.name);
    }
    return names;
  }

  const TempFolder folder_;
  MemoryObjects objects_;
  MemoryStore store_{&objects_};
  std::unique_ptr<CheckpointFiles> files_;
};

TEST_P(CheckpointFilesTest, ComeBackAsTheyWere) {
  ASSERT_THAT(files_->Write(kName, Folder("abc", 1), 3, false), IsOk());
  const auto read = files_->Read(kName);
  ASSERT_THAT(read, IsOk());
  EXPECT_EQ(read->files, Folder("abc", 1).files);
  EXPECT_EQ(read->fields, json({{"step", 1}}));
  const auto opened = files_->Open(kName);
  ASSERT_THAT(opened, IsOk());
  ASSERT_THAT(opened->files, SizeIs(2));
  EXPECT_THAT(opened->files[0].Read(1, 100), IsOkAndHolds("bc"));
  EXPECT_EQ(opened->files[0].name(), "weights");
  EXPECT_THAT(files_->ReadFields(kName), IsOkAndHolds(json({{"step", 1}})));
}

TEST_P(CheckpointFilesTest, AreReplacedOnlyIfAsked) {
  ASSERT_THAT(files_->Write(kName, Folder("abc", 1), 3, false), IsOk());
  EXPECT_THAT(files_->Write(kName, Folder("x", 2), 1, false),
              IsStatus(absl::StatusCode::kAlreadyExists, "\"one\""));
  EXPECT_EQ(files_->Read(kName)->fields, json({{"step", 1}}));
  const std::string version = files_->List("a", false)->front().version;
  ASSERT_THAT(files_->Write(kName, Folder("x", 2), 1, true), IsOk());
  EXPECT_EQ(files_->Read(kName)->files, Folder("x", 2).files);
  EXPECT_NE(files_->List("a", false)->front().version, version);
  ASSERT_THAT(files_->ReplaceFields(kName, {{"step", 3}}), IsOk());
  EXPECT_EQ(files_->Read(kName)->fields, json({{"step", 3}}));
  EXPECT_EQ(files_->Read(kName)->files, Folder("x", 2).files);
}

TEST_P(CheckpointFilesTest, AreListedByAdapter) {
  for (const CheckpointName& name :
       {kName, CheckpointName{"a", "two"}, CheckpointName{"ab", "one"},
        CheckpointName{"b", "one"}}) {
    ASSERT_THAT(files_->Write(name, Folder("w", 1), 1, false), IsOk());
  }
  EXPECT_THAT(Listed("a", false), ElementsAre("a/one", "a/two"));
  EXPECT_THAT(Listed("a", true),
              ::testing::UnorderedElementsAre("a/one", "a/two", "ab/one"));
  EXPECT_THAT(Listed("", true), SizeIs(4));
  EXPECT_THAT(Listed("none", false), IsEmpty());
  const auto fields =
      files_->ReadFieldsOf({kName, {"a", "none"}, {"b", "one"}});
  ASSERT_THAT(fields, SizeIs(3));
  EXPECT_THAT(fields[0], IsOk());
  EXPECT_THAT(fields[1], IsStatus(absl::StatusCode::kNotFound, "\"none\""));
  EXPECT_THAT(fields[2], IsOk());
}

TEST_P(CheckpointFilesTest, AreRemovedWithAllTheirFiles) {
  ASSERT_THAT(files_->Write(kName, Folder("abc", 1), 3, false), IsOk());
  ASSERT_THAT(files_->Write(kName, Folder("abc", 2), 3, true), IsOk());
  ASSERT_THAT(files_->Remove(kName), IsOk());
  EXPECT_THAT(files_->Remove(kName),
              IsStatus(absl::StatusCode::kNotFound, "\"one\""));
  EXPECT_THAT(files_->Read(kName),
              IsStatus(absl::StatusCode::kNotFound, "\"one\""));
  EXPECT_THAT(files_->ReplaceFields(kName, {}),
              IsStatus(absl::StatusCode::kNotFound, ""));
  EXPECT_THAT(objects_.objects, IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, CheckpointFilesTest, ::testing::Bool(),
                         [](const auto& test) {
                           return test.param ? "Objects" : "Disk";
                         });

class ObjectCheckpointsTest : public ::testing::Test {
 protected:
  ObjectCheckpointsTest() { SetLogLevel(LogLevel::kError); }

  ObjectCheckpoints Of(uint64_t epoch, uint64_t log = 0) {
    return {&store_, log, epoch, [this] { return owner_; }, sweep_after_};
  }
  json Manifest() {
    return json::parse(objects_.objects.at("checkpoints/a/one").bytes);
  }

  MemoryObjects objects_;
  MemoryStore store_{&objects_};
  absl::Status owner_;
  absl::Duration sweep_after_ = absl::ZeroDuration();
};

TEST_F(ObjectCheckpointsTest, AnEarlierOwnerReplacesNothing) {
  ASSERT_THAT(Of(2).Write(kName, Folder("new", 2), 3, false), IsOk());
  const auto objects = objects_.objects.size();
  EXPECT_THAT(Of(1).Write(kName, Folder("old", 1), 3, true),
              IsStatus(absl::StatusCode::kAborted, "later owner"));
  EXPECT_THAT(Of(1).ReplaceFields(kName, {}),
              IsStatus(absl::StatusCode::kAborted, "later owner"));
  EXPECT_EQ(Of(1).Read(kName)->fields, json({{"step", 2}}));
  EXPECT_EQ(objects_.objects.size(), objects);
  ASSERT_THAT(Of(3).Write(kName, Folder("newer", 3), 3, true), IsOk());
  owner_ = absl::AbortedError("another has it");
  EXPECT_THAT(Of(3).Remove(kName),
              IsStatus(absl::StatusCode::kAborted, "another has it"));
  EXPECT_THAT(Of(3).Write({"a", "two"}, Folder("w", 1), 1, false),
              IsStatus(absl::StatusCode::kAborted, "another has it"));
  EXPECT_EQ(Of(3).Read(kName)->fields, json({{"step", 3}}));
}

TEST_F(ObjectCheckpointsTest, AnEpochCountsWithinItsLog) {
  ASSERT_THAT(Of(9).Write(kName, Folder("zero", 1), 4, false), IsOk());
  EXPECT_FALSE(Manifest().contains("log"));
  // The adapter's name went to another log.
  ASSERT_THAT(Of(2, 1).Write(kName, Folder("one", 2), 3, true), IsOk());
  EXPECT_EQ(Manifest()["log"], 1);
  EXPECT_THAT(Of(1, 1).Write(kName, Folder("old", 3), 3, true),
              IsStatus(absl::StatusCode::kAborted, "later owner"));
  EXPECT_EQ(Of(1).Read(kName)->files, Folder("one", 2).files);
  ASSERT_THAT(Of(1, 10).ReplaceFields(kName, {{"step", 4}}), IsOk());
  EXPECT_EQ(Manifest()["log"], 10);
  // And back: a manifest without a log is of log 0.
  ASSERT_THAT(Of(1).Write(kName, Folder("back", 5), 4, true), IsOk());
  EXPECT_FALSE(Manifest().contains("log"));
  EXPECT_THAT(Of(0).ReplaceFields(kName, {}),
              IsStatus(absl::StatusCode::kAborted, "later owner"));
}

TEST_F(ObjectCheckpointsTest, OwnersOfTwoLogsUseNoPlaceOfEachOther) {
  ASSERT_THAT(Of(1).Write(kName, Folder("zero", 1), 4, false), IsOk());
  EXPECT_EQ(Manifest()["place"], "e1-0");
  ASSERT_THAT(Of(1, 1).Write(kName, Folder("one", 2), 3, true), IsOk());
  EXPECT_EQ(Of(1).Read(kName)->files, Folder("one", 2).files);
  ASSERT_THAT(Of(1, 11).Write(kName, Folder("more", 3), 4, true), IsOk());
  EXPECT_EQ(Of(1).Read(kName)->files, Folder("more", 3).files);
  EXPECT_THAT(objects_.objects, SizeIs(3));  // Nothing is left of the others.
}

TEST_F(ObjectCheckpointsTest, AnAnswerThatIsLostIsFound) {
  ObjectCheckpoints files = Of(1);
  ASSERT_THAT(files.Write(kName, Folder("abc", 1), 3, false), IsOk());
  // Each request that writes is executed twice.
  objects_.fate = [](const auto&, const auto&) { return Fate::kRepeated; };
  ASSERT_THAT(files.Write(kName, Folder("def", 2), 3, true), IsOk());
  ASSERT_THAT(files.Write({"a", "two"}, Folder("w", 1), 1, false), IsOk());
  EXPECT_EQ(files.Read(kName)->files, Folder("def", 2).files);
}

TEST_F(ObjectCheckpointsTest, AnotherTryReplacesWhatAnEarlierOneHasWritten) {
  ObjectCheckpoints files = Of(1);
  for (int at = 0; at < 3; ++at) {  // Two files, the manifest.
    objects_.fate = [left = at](const auto&, const auto&) mutable {
      return left-- == 0 ? Fate::kLost : Fate::kGood;
    };
    const CheckpointName name = {"a", absl::StrCat("at-", at)};
    EXPECT_TRUE(IsUnreachable(files.Write(name, Folder("abc", 1), 3, false)));
    objects_.fate = nullptr;
    ASSERT_THAT(files.Write(name, Folder("abc", 1), 3, false), IsOk());
    EXPECT_EQ(files.Read(name)->files, Folder("abc", 1).files);
    // Now it exists.
    EXPECT_THAT(files.Write(name, Folder("abc", 1), 3, false),
                IsStatus(absl::StatusCode::kAlreadyExists, ""));
  }
  EXPECT_THAT(objects_.objects, SizeIs(9));  // Nothing is there twice.
}

TEST_F(ObjectCheckpointsTest, AStoreThatIsAwayIsNoCheckpointThatExists) {
  objects_.read_error = absl::UnavailableError("away");
  const absl::Status refused = Of(1).Write(kName, Folder("abc", 1), 3, false);
  EXPECT_THAT(refused, IsStatus(absl::StatusCode::kResourceExhausted, "away"));
  EXPECT_EQ(FindReason(refused)->name, "CHECKPOINT_STORE_UNREACHABLE");
}

TEST_F(ObjectCheckpointsTest, AStoreThatIsAwayEndsTheStepAndLosesNothing) {
  ObjectCheckpoints files = Of(1);
  ASSERT_THAT(files.Write(kName, Folder("abc", 1), 3, false), IsOk());
  for (int at = 0; at < 3; ++at) {  // Two files, the manifest.
    objects_.fate = [left = at](const auto&, const auto&) mutable {
      return left-- == 0 ? Fate::kRefused : Fate::kGood;
    };
    const absl::Status refused = files.Write(kName, Folder("def", 2), 3, true);
    EXPECT_THAT(refused, IsStatus(absl::StatusCode::kResourceExhausted, ""));
    EXPECT_EQ(FindReason(refused)->name, "CHECKPOINT_STORE_UNREACHABLE");
    objects_.fate = nullptr;
    EXPECT_EQ(files.Read(kName)->files, Folder("abc", 1).files);
  }
  // A store that is away is no damage.
  objects_.read_error = absl::UnavailableError("away");
  for (const absl::Status& status :
       {files.Read(kName).status(), files.Open(kName).status(),
        files.ReadFields(kName).status(), files.Remove(kName)}) {
    EXPECT_EQ(FindReason(status)->name, "CHECKPOINT_STORE_UNREACHABLE");
  }
}

TEST_F(ObjectCheckpointsTest, AStoreThatIsAwayIsNoEmptyList) {
  objects_.list_error = absl::UnavailableError("away");
  EXPECT_TRUE(IsUnreachable(Of(2).List("a", false).status()));
}

TEST_F(ObjectCheckpointsTest, ALateDeletionSparesTheLaterOwnersCheckpoint) {
  ASSERT_THAT(Of(1).Write(kName, Folder("abc", 1), 3, false), IsOk());
  objects_.before = [this](const std::string& operation, const auto& key) {
    if (operation != "delete" || key != "checkpoints/a/one") return;
    objects_.before = nullptr;
    ASSERT_THAT(Of(2).Write(kName, Folder("new", 2), 3, true), IsOk());
  };
  EXPECT_THAT(Of(1).Remove(kName), IsStatus(absl::StatusCode::kAborted, ""));
  ASSERT_THAT(Of(3).Read(kName), IsOk());
  EXPECT_EQ(Of(3).Read(kName)->files, Folder("new", 2).files);
  EXPECT_THAT(objects_.objects, SizeIs(3));
}

// Sweeps to the end.
void SweepAll(ObjectCheckpoints* files) {
  for (int i = 0; i < 100; ++i) {
    files->Sweep();
    absl::SleepFor(absl::Milliseconds(1));
  }
}

TEST_F(ObjectCheckpointsTest, FilesOfInterruptedSavesAreSwept) {
  const CheckpointName two = {"a", "two"};
  ASSERT_THAT(Of(2).Write(kName, Folder("abc", 1), 3, false), IsOk());
  ASSERT_THAT(Of(3).Write(two, Folder("abc", 2), 3, false), IsOk());
  const auto whole = objects_.objects;
  // Saves of a name that is there, and of others, end before their manifests.
  objects_.fate = [](const std::string&, const std::string& key) {
    return key.starts_with("checkpoints/") ? Fate::kRefused : Fate::kGood;
  };
  const auto save = [this](uint64_t epoch, const CheckpointName& name) {
    EXPECT_TRUE(IsUnreachable(Of(epoch).Write(name, Folder("x", 9), 1, true)));
  };
  for (int i = 0; i < 9; ++i) save(1, {"b", absl::StrCat("new-", i)});
  save(3, kName);
  EXPECT_THAT(objects_.objects, SizeIs(6 + 20));
  const auto earlier = objects_.objects;
  save(4, two);
  save(5, kName);
  objects_.fate = nullptr;
  // Places of other owners than earlier ones, and of names of other kinds.
  objects_.objects["checkpoint-files/a/one/n1-e1-0/weights"] = {};
  const auto others = objects_.objects.size() - earlier.size();
  ObjectCheckpoints owner = Of(4);
  const auto set = [this](absl::Status MemoryObjects::*error,
                          const absl::Status& status) {
    MutexLock lock(&objects_.mu);  // A thread of the owner may look.
    objects_.*error = status;
  };
  set(&MemoryObjects::list_error, absl::UnavailableError("away"));
  SweepAll(&owner);
  set(&MemoryObjects::list_error, absl::OkStatus());
  set(&MemoryObjects::read_error, absl::UnavailableError("away"));
  SweepAll(&owner);
  set(&MemoryObjects::read_error, absl::OkStatus());
  EXPECT_THAT(objects_.objects, SizeIs(earlier.size() + others));
  SweepAll(&owner);
  EXPECT_THAT(objects_.objects, SizeIs(whole.size() + others));
  for (const auto& [key, object] : whole) {
    EXPECT_TRUE(objects_.objects.contains(key)) << key;
  }
  // Nothing is asked for any more.
  objects_.before = [](const auto& operation, const auto&) {
    ADD_FAILURE() << operation;
  };
  SweepAll(&owner);
}

TEST_F(ObjectCheckpointsTest, ASweepComesLateAndInSlices) {
  objects_.fate = [](const std::string&, const std::string& key) {
    return key.starts_with("checkpoints/") ? Fate::kRefused : Fate::kGood;
  };
  for (int i = 0; i < 5; ++i) {
    const CheckpointName name = {"a", absl::StrCat("new-", i)};
    EXPECT_FALSE(Of(1).Write(name, Folder("x", 9), 1, true).ok());
  }
  objects_.fate = nullptr;
  sweep_after_ = absl::Minutes(9);
  ObjectCheckpoints later = Of(2);
  SweepAll(&later);
  EXPECT_THAT(objects_.objects, SizeIs(10));
  sweep_after_ = absl::ZeroDuration();
  ObjectCheckpoints owner = Of(2);
  for (int i = 0; objects_.objects.size() == 10 && i < 10000; ++i) {
    owner.Sweep();
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_THAT(objects_.objects, SizeIs(2));  // Of the last place.
  owner_ = absl::AbortedError("another has it");
  SweepAll(&owner);
  EXPECT_THAT(objects_.objects, SizeIs(2));
}

TEST_F(ObjectCheckpointsTest, DamageIsFoundAndNamed) {
  ObjectCheckpoints files = Of(1);
  ASSERT_THAT(files.Write(kName, Folder("abc", 1), 3, false), IsOk());
  const std::string weights = "checkpoint-files/a/one/e1-0/weights";
  ASSERT_TRUE(objects_.objects.contains(weights));
  objects_.objects[weights].bytes = "abd";
  EXPECT_THAT(files.Read(kName), IsStatus(absl::StatusCode::kDataLoss,
                                          "weights of folder \"one\""));
  const auto opened = files.Open(kName).value();
  EXPECT_THAT(opened.files[0].Read(0, 2), IsOkAndHolds("ab"));
  EXPECT_THAT(opened.files[0].Read(2, 9),
              IsStatus(absl::StatusCode::kDataLoss, "another SHA-256"));
  objects_.objects[weights].bytes = "abcd";
  EXPECT_THAT(opened.files[0].Read(0, 9),
              IsStatus(absl::StatusCode::kDataLoss, "has 4 bytes, not 3"));
  objects_.objects.erase(weights);
  EXPECT_THAT(files.Read(kName),
              IsStatus(absl::StatusCode::kDataLoss, "weights"));
  objects_.objects["checkpoints/a/one"].bytes = "{}";
  EXPECT_THAT(files.ReadFields(kName),
              IsStatus(absl::StatusCode::kDataLoss, "MANIFEST.json"));
  EXPECT_THAT(files.Remove(kName), IsOk());
}

}  // namespace
}  // namespace weft::checkpoint
