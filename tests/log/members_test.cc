// Tests the choice of the process that samples from a checkpoint.
#include "src/log/bucket/members.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "prometheus/registry.h"
#include "src/log/bucket/log_keys.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/manifest.h"
#include "src/log/bucket/standby.h"
#include "tests/support/memory_store.h"
#include "tests/support/status_matchers.h"

namespace weft::log {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::Gt;
using ::testing::Le;
using ::testing::Lt;
using ::testing::Pair;

constexpr char kSelf[] = "self:1";

class MemberChoiceTest : public ::testing::Test {
 protected:
  // A look finds a new sign of life.
  void See(const std::string& name, std::optional<uint64_t> tokens) {
    SeeAgain(name, tokens, absl::StrCat(++etags_));
  }
  void SeeAgain(const std::string& name, std::optional<uint64_t> tokens,
                const std::string& etag) {
    choice_.See(name,
                {.etag = etag,
                 .address = absl::StrCat(name, ":1"),
                 .queued_tokens = tokens},
                now_);
  }
  // Draws even lots.
  std::string Choose(std::optional<uint64_t> own, uint64_t tokens = 10) {
    lot_ = std::fmod(lot_ + 0.618034, 1.0);
    return choice_.Choose(kSelf, own, tokens, lot_);
  }
  // Returns how often each process is chosen for `calls` calls at once.
  std::map<std::string, int> Chosen(int calls, std::optional<uint64_t> own) {
    std::map<std::string, int> chosen;
    for (int i = 0; i < calls; ++i) ++chosen[Choose(own)];
    return chosen;
  }
  // Returns whether a process gets some of the calls.
  bool MayChoose(const std::string& name, std::optional<uint64_t> own) {
    return Chosen(100, own).contains(name);
  }

  MemberChoice choice_;
  absl::Time now_ = absl::FromUnixSeconds(100);
  int etags_ = 0;
  double lot_ = 0;
};

TEST_F(MemberChoiceTest, ItHasAllLotsUntilItKnowsOthers) {
  EXPECT_THAT(Chosen(50, 1'000'000), ElementsAre(Pair("", 50)));
}

TEST_F(MemberChoiceTest, FewerTokensHaveMoreLots) {
  See("a", 100'000);
  See("b", 0);
  EXPECT_GE(Chosen(100, 100'000)["b:1"], 98);
  See("a", 0);
  See("b", 100'000);
  EXPECT_GE(Chosen(100, 100'000)["a:1"], 98);
  See("a", 100'000);
  EXPECT_GE(Chosen(100, 0)[""], 98);
}

TEST_F(MemberChoiceTest, AFewTokensMoreLeaveSomeLots) {
  See("a", 160);
  EXPECT_THAT(Chosen(8, 0)[""], AllOf(Ge(5), Le(7)));
}

TEST_F(MemberChoiceTest, CallsAtOnceAreSharedOut) {
  See("a", 0);
  See("b", 0);
  choice_.SeeOwn(0);
  // Others end their samples as fast as this one, but cannot say so at once.
  for (const auto& [name, calls] : Chosen(60, 0)) {
    EXPECT_THAT(calls, AllOf(Ge(17), Le(23))) << name;
  }
}

TEST_F(MemberChoiceTest, WhatWasSentCountsUntilANewFigure) {
  See("a", 0);
  choice_.SeeOwn(0);
  Choose(100'000'000, 100'000);
  for (int i = 0; i < 3; ++i) {
    now_ += absl::Seconds(1);
    SeeAgain("a", 0, absl::StrCat(etags_));
    EXPECT_LE(Chosen(100, 0)["a:1"], 2);
  }
  // A figure does not have what was sent a moment before.
  Choose(100'000'000, 100'000);
  See("a", 0);
  EXPECT_LE(Chosen(100, 0)["a:1"], 2);
  See("a", 0);
  EXPECT_GE(Chosen(100, 1000)["a:1"], 50);
}

TEST_F(MemberChoiceTest, OnlyWhoLivesAndTakesSamplesIsChosen) {
  EXPECT_FALSE(MayChoose("a:1", 1000));
  See("a", 0);
  EXPECT_TRUE(MayChoose("a:1", 1000));
  See("a", std::nullopt);  // It drains, or is of an earlier version.
  EXPECT_FALSE(MayChoose("a:1", 1000));
  See("a", 0);
  now_ += kOwnerPatience - absl::Seconds(1);
  SeeAgain("a", 0, absl::StrCat(etags_));
  EXPECT_TRUE(MayChoose("a:1", 1000));
  now_ += absl::Seconds(1);
  SeeAgain("a", 0, absl::StrCat(etags_));
  EXPECT_FALSE(MayChoose("a:1", 1000));
  See("a", 0);
  EXPECT_TRUE(MayChoose("a:1", 1000));
  // While no look succeeds, nobody is dead: a store that is down stops nothing.
  now_ += absl::Hours(1);
  EXPECT_TRUE(MayChoose("a:1", 1000));
}

TEST_F(MemberChoiceTest, AProcessThatTakesNoSamplesSendsAllOn) {
  See("a", 1'000'000);
  EXPECT_THAT(Chosen(50, std::nullopt), ElementsAre(Pair("a:1", 50)));
  See("a", std::nullopt);
  EXPECT_THAT(Chosen(50, std::nullopt), ElementsAre(Pair("", 50)));
}

TEST_F(MemberChoiceTest, AProcessIsNotSentToItself) {
  choice_.See("x", {.etag = "1", .address = kSelf, .queued_tokens = 0}, now_);
  choice_.See("y", {.etag = "2", .address = "", .queued_tokens = 0}, now_);
  EXPECT_THAT(Chosen(50, 1000), ElementsAre(Pair("", 50)));
}

TEST(SampleLoadTest, CountsSamplesUntilTheyEnd) {
  prometheus::Registry registry;
  SampleLoad load(&registry);
  EXPECT_EQ(load.queued_tokens(), std::nullopt);
  load.SetOpen(true);
  auto one = load.Add(100);
  const auto two = load.Add(30);
  EXPECT_EQ(load.queued_tokens(), 130u);
  const auto copy = one;
  one.reset();
  EXPECT_EQ(load.queued_tokens(), 130u);
  load.SetOpen(false);
  EXPECT_EQ(load.queued_tokens(), std::nullopt);
  for (int i = 0; i < 100; ++i) static_cast<void>(load.Add(40));
  EXPECT_THAT(load.tokens_of_one(), AllOf(Gt(30u), Lt(50u)));
}

TEST(ManifestTest, KeepsTheTokensOfSamples) {
  Manifest manifest{.epoch = 3};
  EXPECT_EQ(DecodeManifest(EncodeManifest(manifest))->queued_tokens,
            std::nullopt);
  manifest.queued_tokens = 7;
  EXPECT_EQ(DecodeManifest(EncodeManifest(manifest))->queued_tokens, 7u);
}

// The owners of some logs, who tell in their manifests what they have to do.
class MembersTest : public ::testing::Test {
 protected:
  std::unique_ptr<LogOwner> Own(int log) {
    const Instance self = {.name = absl::StrCat("m", log),
                           .process = absl::StrCat("process-", log),
                           .address = absl::StrCat("m", log, ":1")};
    return LogOwner::Take(&store_, {.log = log}, {}, self).value();
  }
  // Waits until `address` is chosen nearly always.
  static bool Chooses(Members& members, const std::string& address) {
    const absl::Time limit = absl::Now() + absl::Minutes(1);
    for (int in_a_row = 0; in_a_row < 20;) {
      if (absl::Now() >= limit) return false;
      in_a_row = members.Choose() == address ? in_a_row + 1 : 0;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return true;
  }

  store::MemoryObjects objects_;
  store::MemoryStore store_{&objects_};
  prometheus::Registry registry_;
  OwnerMetrics metrics_{&registry_};
};

TEST_F(MembersTest, AnOwnerTellsItsTokensAtEachBeat) {
  const auto one = Own(0);
  const auto two = Own(1);
  metrics_.samples.SetOpen(true);
  const auto held = metrics_.samples.Add(1'000'000);
  // So what is sent is small.
  for (int i = 0; i < 200; ++i) static_cast<void>(metrics_.samples.Add(1));
  Members members(&store_, 0, 2, "m0:1", &metrics_.samples, &registry_);
  EXPECT_EQ(members.Choose(), "");
  ASSERT_THAT(two->Beat(50), IsOk());
  EXPECT_TRUE(Chooses(members, "m1:1"));
  ASSERT_THAT(two->Beat(5'000'000), IsOk());
  EXPECT_TRUE(Chooses(members, ""));
  ASSERT_THAT(two->Beat(60), IsOk());
  EXPECT_TRUE(Chooses(members, "m1:1"));
  ASSERT_THAT(two->NameSnapshot({.name = "s"}), IsOk());
  EXPECT_EQ(LookAtManifest(store_, {.log = 1})->manifest.queued_tokens, 60u);
  // The next owner has other work, and one that has ended has none.
  const auto next = LogOwner::Take(&store_, {.log = 1},
                                   *LookAtManifest(store_, {.log = 1}), {});
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(LookAtManifest(store_, {.log = 1})->manifest.queued_tokens,
            std::nullopt);
  ASSERT_THAT((*next)->Beat(70), IsOk());
  ASSERT_THAT((*next)->Release(), IsOk());
  EXPECT_EQ(LookAtManifest(store_, {.log = 1})->manifest.queued_tokens,
            std::nullopt);
  EXPECT_TRUE(Chooses(members, ""));
}

TEST_F(MembersTest, ABeatTellsTheLoad) {
  const auto owner = Own(0);
  metrics_.samples.SetOpen(true);
  const auto held = metrics_.samples.Add(123);
  const HeartbeatThread beats(owner.get(), &metrics_);
  const absl::Time limit = absl::Now() + absl::Minutes(1);
  std::optional<uint64_t> told;
  while (told != 123u && absl::Now() < limit) {
    told = LookAtManifest(store_, {.log = 0})->manifest.queued_tokens;
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_EQ(told, 123u);
}

// However many logs there are, a look is short, and each process has others.
TEST_F(MembersTest, AProcessLooksAtAFewOthers) {
  std::vector<std::string> asked;
  std::atomic<int> num_asked = 0;
  objects_.before = [&](const std::string&, const std::string& key) {
    asked.push_back(key);
    ++num_asked;
  };
  Members members(&store_, 98, 100, "m98:1", &metrics_.samples, &registry_);
  EXPECT_EQ(members.Choose(), "");
  const absl::Time limit = absl::Now() + absl::Minutes(1);
  while (num_asked < 16 && absl::Now() < limit) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  members.Stop();
  EXPECT_EQ(asked.size(), 16u);
  EXPECT_EQ(asked.front(), "owners/99");
  EXPECT_EQ(asked.back(), "owners/14");
}

TEST_F(MembersTest, ManyCallsShareALook) {
  std::atomic<int> num_asked = 0;
  objects_.before = [&](const std::string&, const std::string&) {
    ++num_asked;
  };
  Members members(&store_, 0, 3, "m0:1", &metrics_.samples, &registry_);
  const absl::Time start = absl::Now();
  while (absl::Now() - start < absl::Milliseconds(100)) {
    EXPECT_EQ(members.Choose(), "");
  }
  members.Stop();
  EXPECT_LE(num_asked, 2 * (1 + (absl::Now() - start) / absl::Seconds(2)));
}

}  // namespace
}  // namespace weft::log
