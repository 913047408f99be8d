// What every store must keep. Runs against a folder, and against the S3 store
// WEFT_TEST_STORE (s3://BUCKET/PREFIX) if the environment names one. With
// WEFT_TEST_STORE_IS_FAULTY requests to it get lost, late, refused or doubled.
#include "src/store/object_store.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/store/open_store.h"
#include "src/store/s3_store.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::store {
namespace {

using ::testing::ElementsAre;

constexpr uint64_t kMiB = 1 << 20;
constexpr int kWriters = 8;

std::vector<std::string> Kinds() {
  std::vector<std::string> kinds = {"folder"};
  if (std::getenv("WEFT_TEST_STORE") != nullptr) kinds.push_back("s3");
  return kinds;
}

std::string Random(size_t bytes) {
  static std::mt19937_64 random(std::random_device{}());
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

class ObjectStoreTest : public ::testing::TestWithParam<std::string> {
 protected:
  ObjectStoreTest() {
    if (GetParam() == "folder") {
      store_ = *OpenStore("file://" + folder_.path() + "/store", nullptr);
      return;
    }
    const std::string url = absl::StrCat(std::getenv("WEFT_TEST_STORE"), "/",
                                         std::random_device{}());
    S3Options options = *ParseS3Url(url);
    options.part_bytes = 5 * kMiB;
    // Under contention some stores take seconds.
    options.time_limit = absl::Seconds(60);
    options.request_limit = faulty_ ? absl::Seconds(2) : absl::Seconds(10);
    store_ = std::make_unique<S3Store>(options);
  }

  // Return whether the object is there with these bytes, and so that the write
  // had its effect. The error of a write whose answer was lost may be its own.
  bool Created(const std::string& key, const std::string& bytes) {
    const auto etag = store_->Create(key, {bytes});
    return etag.ok() || (faulty_ && Holds(etag.status(), key, bytes));
  }
  bool Swapped(const std::string& key, const std::string& bytes,
               const std::string& etag) {
    const auto next = store_->Swap(key, bytes, etag);
    return next.ok() || (faulty_ && Holds(next.status(), key, bytes));
  }
  bool Holds(const absl::Status& error, const std::string& key,
             const std::string& bytes) {
    EXPECT_TRUE(absl::IsAlreadyExists(error) || absl::IsAborted(error))
        << error;
    const auto object = store_->Get(key, 64 * kMiB);
    return object.ok() && object->bytes == bytes;
  }
  std::string Etag(const std::string& key) {
    return store_->Get(key, 64 * kMiB).value().etag;
  }
  std::vector<std::string> Keys(const std::string& prefix,
                                const std::string& after = "",
                                size_t max = 10000) {
    const auto listed = store_->List(prefix, after, max);
    EXPECT_THAT(listed, IsOk());
    std::vector<std::string> keys;
    for (const ListedObject& object : listed.value())
      keys.push_back(object.key);
    return keys;
  }
  // Runs `body` in as many threads as there are writers.
  static void Race(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kWriters; ++i) threads.emplace_back(body, i);
    for (std::thread& thread : threads) thread.join();
  }

  const bool faulty_ =
      GetParam() == "s3" && std::getenv("WEFT_TEST_STORE_IS_FAULTY") != nullptr;
  int next_ = 0;
  TempFolder folder_;
  std::unique_ptr<ObjectStore> store_;
};

INSTANTIATE_TEST_SUITE_P(Stores, ObjectStoreTest, ::testing::ValuesIn(Kinds()),
                         [](const auto& test) { return test.param; });

TEST_P(ObjectStoreTest, AnObjectIsWhatWasWritten) {
  const std::string bytes = Random(10'000);
  const std::string_view all = bytes;
  const auto etag = store_->Create(
      "a/b", {all.substr(0, 1), "", all.substr(1, 4095), all.substr(4096)});
  if (!faulty_) {
    ASSERT_THAT(etag, IsOk());
  }
  const auto object = store_->Get("a/b", 10'000);
  ASSERT_THAT(object, IsOk());
  EXPECT_EQ(object->bytes, bytes);
  EXPECT_FALSE(object->etag.empty());
  if (etag.ok()) {
    EXPECT_EQ(object->etag, *etag);
  }
}

TEST_P(ObjectStoreTest, AnObjectMayBeEmpty) {
  EXPECT_TRUE(Created("empty", ""));
  EXPECT_EQ(store_->Get("empty", 0).value().bytes, "");
  uint64_t size = 1;
  std::string out(4, 'x');
  EXPECT_THAT(store_->GetRange("empty", 0, out, &size), IsOkAndHolds(0u));
  EXPECT_EQ(size, 0u);
}

TEST_P(ObjectStoreTest, AnObjectIsCreatedOnce) {
  ASSERT_TRUE(Created("a", "first"));
  EXPECT_THAT(store_->Create("a", {"second"}),
              IsStatus(absl::StatusCode::kAlreadyExists, store_->NameOf("a")));
  EXPECT_EQ(store_->Get("a", 100)->bytes, "first");
}

TEST_P(ObjectStoreTest, ASwapNeedsTheETag) {
  ASSERT_TRUE(Created("a", "1"));
  const std::string first = Etag("a");
  ASSERT_TRUE(Swapped("a", "2", first));
  EXPECT_THAT(store_->Swap("a", "3", first),
              IsStatus(absl::StatusCode::kAborted, store_->NameOf("a")));
  EXPECT_EQ(store_->Get("a", 100)->bytes, "2");
  EXPECT_NE(Etag("a"), first);
  ASSERT_TRUE(Swapped("a", "3", Etag("a")));
}

TEST_P(ObjectStoreTest, ASwapOfAMissingObjectIsAborted) {
  ASSERT_TRUE(Created("other", "1"));
  EXPECT_THAT(store_->Swap("missing", "2", Etag("other")),
              IsStatus(absl::StatusCode::kAborted, "missing"));
  EXPECT_THAT(store_->Get("missing", 100),
              IsStatus(absl::StatusCode::kNotFound, "missing"));
}

TEST_P(ObjectStoreTest, AGetRefusesMoreBytesThanItsLimit) {
  for (const size_t bytes : {size_t{2}, size_t{200'000}}) {
    const std::string key = absl::StrCat("a", bytes);
    ASSERT_TRUE(Created(key, Random(bytes)));
    EXPECT_THAT(store_->Get(key, bytes), IsOk());
    EXPECT_THAT(store_->Get(key, bytes - 1),
                IsStatus(absl::StatusCode::kResourceExhausted, key));
  }
}

TEST_P(ObjectStoreTest, ARangeIsPartOfTheObject) {
  const std::string bytes = Random(1000);
  ASSERT_TRUE(Created("a", bytes));
  for (const auto& [offset, wanted, got] :
       std::vector<std::array<size_t, 3>>{{0, 1000, 1000},
                                          {0, 2000, 1000},
                                          {10, 20, 20},
                                          {990, 20, 10},
                                          {999, 1, 1},
                                          {1000, 1, 0},
                                          {5000, 5, 0},
                                          {5, 0, 0}}) {
    SCOPED_TRACE(absl::StrCat(offset, " ", wanted));
    std::string out(wanted, 'x');
    uint64_t size = 0;
    EXPECT_THAT(store_->GetRange("a", offset, out, &size), IsOkAndHolds(got));
    EXPECT_EQ(size, 1000u);
    EXPECT_EQ(out.substr(0, got), got ? bytes.substr(offset, got) : "");
  }
  uint64_t size = 0;
  std::string out(1, 'x');
  EXPECT_THAT(store_->GetRange("b", 0, out, &size),
              IsStatus(absl::StatusCode::kNotFound, "b"));
  EXPECT_THAT(store_->GetRange("b", 0, {}, &size),
              IsStatus(absl::StatusCode::kNotFound, "b"));
}

TEST_P(ObjectStoreTest, ALargeRangeComesWhole) {
  constexpr size_t kBytes = (20 << 20) + 7;
  const std::string bytes = Random(kBytes);
  ASSERT_TRUE(Created("a", bytes));
  for (const size_t offset : {size_t{0}, size_t{12345}, kBytes - 1}) {
    std::string out(kBytes + 5, 'x');  // Its end is behind the object's.
    uint64_t size = 0;
    EXPECT_THAT(store_->GetRange("a", offset, out, &size),
                IsOkAndHolds(kBytes - offset));
    EXPECT_EQ(size, kBytes);
    EXPECT_TRUE(out.starts_with(bytes.substr(offset)));
  }
}

TEST_P(ObjectStoreTest, AListSeesEachWriteAndDeletion) {
  EXPECT_THAT(Keys(""), ElementsAre());
  ASSERT_TRUE(Created("logs/0/records/1", "one"));
  ASSERT_TRUE(Created("logs/0/records/2", "two!"));
  ASSERT_TRUE(Created("logs/1/records/1", "other"));
  EXPECT_THAT(Keys("logs/0/"),
              ElementsAre("logs/0/records/1", "logs/0/records/2"));
  EXPECT_THAT(Keys("logs/0/rec", "logs/0/records/1"),
              ElementsAre("logs/0/records/2"));
  EXPECT_THAT(Keys("logs/", "", 1), ElementsAre("logs/0/records/1"));
  EXPECT_THAT(Keys("nothing/"), ElementsAre());
  const auto listed = store_->List("logs/0/", "", 10).value();
  EXPECT_EQ(listed[1].size, 4u);
  EXPECT_EQ(listed[1].etag, Etag("logs/0/records/2"));
  ASSERT_TRUE(Swapped("logs/0/records/2", "more bytes", listed[1].etag));
  EXPECT_EQ(store_->List("logs/0/", "", 10).value()[1].size, 10u);
  EXPECT_EQ(store_->List("logs/0/", "", 10).value()[1].etag,
            Etag("logs/0/records/2"));
  EXPECT_THAT(store_->Delete("logs/0/records/2"), IsOk());
  EXPECT_THAT(store_->Delete("logs/0/records/2"), IsOk());
  EXPECT_THAT(store_->Delete("never/was"), IsOk());
  EXPECT_THAT(Keys("logs/"),
              ElementsAre("logs/0/records/1", "logs/1/records/1"));
  EXPECT_THAT(store_->Get("logs/0/records/2", 100),
              IsStatus(absl::StatusCode::kNotFound, "records/2"));
  // The name is free again.
  EXPECT_TRUE(Created("logs/0/records/2", "again"));
}

TEST_P(ObjectStoreTest, ADeletionWithAnEtagSparesWhatHasAnother) {
  ASSERT_TRUE(Created("a", "one"));
  const std::string first = Etag("a");
  ASSERT_TRUE(Swapped("a", "other", first));
  EXPECT_THAT(store_->DeleteIf("a", first),
              IsStatus(absl::StatusCode::kAborted, "a"));
  EXPECT_THAT(Keys(""), ElementsAre("a"));
  EXPECT_THAT(store_->DeleteIf("a", Etag("a")), IsOk());
  EXPECT_THAT(Keys(""), ElementsAre());
  EXPECT_THAT(store_->DeleteIf("a", first), IsOk());
}

TEST_P(ObjectStoreTest, KeysKeepTheirBytesAndTheirOrder) {
  std::vector<std::string> keys;
  for (const char* part : {" !\"#$", "%2F%&'()*", "+,.-_~", "09:;<=>?@AZ",
                           "[]^`az{|}", "a b", "a+b", "a%20b"}) {
    keys.push_back(absl::StrCat("odd/", part));
    ASSERT_TRUE(Created(keys.back(), part)) << part;
  }
  for (const std::string& key : keys) {
    EXPECT_EQ(store_->Get(key, 100).value().bytes, key.substr(4));
  }
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(Keys("odd/"), keys);
  EXPECT_EQ(Keys("odd/a", "odd/a b").size(), 2u);
}

TEST_P(ObjectStoreTest, TheOrderIsThatOfBytesAcrossFolders) {
  for (const char* key : {"o/a/b", "o/a-b", "o/a.b", "o/a0", "o/a/c/d"}) {
    ASSERT_TRUE(Created(key, "1"));
  }
  EXPECT_THAT(Keys("o/"),
              ElementsAre("o/a-b", "o/a.b", "o/a/b", "o/a/c/d", "o/a0"));
}

TEST_P(ObjectStoreTest, WhatIsNoKeyIsRefused) {
  for (const std::string& key :
       {std::string(""), std::string("/a"), std::string("a/"),
        std::string("a//b"), std::string("a/../b"), std::string("."),
        std::string("a\nb"), std::string("a\\b"), std::string("\xC3\xA9"),
        std::string(513, 'a')}) {
    const auto refused = IsStatus(absl::StatusCode::kInvalidArgument, "key");
    uint64_t size = 0;
    EXPECT_THAT(store_->Create(key, {"x"}), refused);
    EXPECT_THAT(store_->Swap(key, "x", "e"), refused);
    EXPECT_THAT(store_->Get(key, 1), refused);
    EXPECT_THAT(store_->GetRange(key, 0, {}, &size), refused);
    EXPECT_THAT(store_->Delete(key), refused);
  }
}

TEST_P(ObjectStoreTest, ALongListComesInPages) {
  // More than the 1,000 keys of a page of S3.
  const int count = faulty_ ? 120 : 1100;
  std::vector<std::string> keys;
  for (int i = 2; i < count; ++i) {
    keys.push_back(absl::StrCat("r/", absl::Dec(i, absl::kZeroPad20)));
  }
  std::atomic<size_t> next = 0;
  Race([&](int) {
    for (size_t i = next++; i < keys.size(); i = next++) {
      EXPECT_TRUE(Created(keys[i], keys[i]));
    }
  });
  EXPECT_EQ(Keys("r/"), keys);
  const size_t half = keys.size() - 50;
  EXPECT_EQ(Keys("r/", keys[half]),
            std::vector<std::string>(keys.begin() + half + 1, keys.end()));
  EXPECT_EQ(Keys("r/", "", half),
            std::vector<std::string>(keys.begin(), keys.begin() + half));
}

TEST_P(ObjectStoreTest, ALargeObjectIsSentInPartsAndCreatedOnce) {
  const std::string bytes = Random(12 * kMiB + 5);
  const std::string_view all = bytes;
  const auto etag =
      store_->Create("large", {all.substr(0, kMiB), all.substr(kMiB)});
  if (!faulty_) {
    ASSERT_THAT(etag, IsOk());
  }
  const auto object = store_->Get("large", 16 * kMiB);
  ASSERT_THAT(object, IsOk());
  EXPECT_TRUE(object->bytes == bytes);
  if (etag.ok()) {
    EXPECT_EQ(object->etag, *etag);
  }
  EXPECT_EQ(Keys("large").size(), 1u);
  EXPECT_THAT(store_->Create("large", {Random(11 * kMiB)}),
              IsStatus(absl::StatusCode::kAlreadyExists, "large"));
  EXPECT_THAT(store_->Create("large", {"small"}),
              IsStatus(absl::StatusCode::kAlreadyExists, "large"));
  EXPECT_EQ(store_->Get("large", 16 * kMiB)->etag, object->etag);
}

TEST_P(ObjectStoreTest, OfEightWritersOfAKeyOneWins) {
  for (const size_t bytes : {1000, 10, 200'000, 1000}) {
    const std::string key = absl::StrCat("race/", next_++);
    std::atomic<int> winners = 0;
    Race([&](int i) {
      winners += Created(key, std::string(bytes, static_cast<char>('a' + i)));
    });
    EXPECT_EQ(winners, 1) << key;
    const std::string object = store_->Get(key, kMiB).value().bytes;
    EXPECT_EQ(object, std::string(bytes, object[0]));
  }
}

TEST_P(ObjectStoreTest, ALargeObjectOfEightWritersIsWhole) {
  constexpr size_t kBytes = 6 * kMiB;
  std::atomic<int> winners = 0;
  Race([&](int i) {
    winners +=
        Created("large", std::string(kBytes, static_cast<char>('a' + i)));
  });
  EXPECT_GE(winners, 1);
  const std::string object = store_->Get("large", 16 * kMiB).value().bytes;
  EXPECT_TRUE(object == std::string(kBytes, object[0]));
}

// The count is the number of lines. Each line is of one thread and step, so a
// thread whose answer was lost finds out whether its swap happened.
TEST_P(ObjectStoreTest, ACounterThatEightThreadsSwapIsExact) {
  constexpr int kSteps = 5;
  ASSERT_TRUE(Created("n", ""));
  Race([&](int i) {
    for (int step = 0; step < kSteps;) {
      const auto now = store_->Get("n", kMiB);
      ASSERT_THAT(now, IsOk());
      const std::string line = absl::StrCat(i, ".", step, "\n");
      if (faulty_ && absl::StrContains(now->bytes, line)) {
        ++step;
        continue;
      }
      const auto etag = store_->Swap("n", now->bytes + line, now->etag);
      if (etag.ok()) {
        ++step;
      } else {
        ASSERT_THAT(etag, IsStatus(absl::StatusCode::kAborted, "n"));
      }
    }
  });
  std::vector<std::string> lines =
      absl::StrSplit(store_->Get("n", kMiB)->bytes, '\n', absl::SkipEmpty());
  EXPECT_EQ(lines.size(), size_t{kWriters} * kSteps);
  EXPECT_EQ(std::set<std::string>(lines.begin(), lines.end()).size(),
            lines.size());
}

TEST_P(ObjectStoreTest, TheConditionsAreKept) {
  EXPECT_THAT(CheckConditions(store_.get()), IsOk());
  EXPECT_THAT(Keys("probe/"), ElementsAre());
}

TEST_P(ObjectStoreTest, AStoppedStoreEndsItsCalls) {
  store_->Stop();
  const auto stopped = IsStatus(absl::StatusCode::kCancelled, "");
  EXPECT_THAT(store_->Create("a", {"1"}), stopped);
  EXPECT_THAT(store_->Get("a", 1), stopped);
  EXPECT_THAT(store_->List("a", "", 1), stopped);
  EXPECT_THAT(store_->Delete("a"), stopped);
}

}  // namespace
}  // namespace weft::store
