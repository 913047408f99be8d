#include "src/directory/directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/base/reason.h"
#include "tests/support/memory_store.h"
#include "tests/support/status_matchers.h"

namespace weft::directory {
namespace {

using store::MemoryObjects;
using store::MemoryStore;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Fate = MemoryObjects::Fate;

// The directories of two owners, of logs 0 and 1 of three.
class DirectoryTest : public ::testing::Test {
 protected:
  Logs LogsOf(int own) {
    return {.own = own,
            .epoch = ++epoch_,
            .count = 3,
            .owner = [this](int log) { return OwnerOf(log); },
            .owners =
                [this] {
                  return std::vector<absl::StatusOr<OwnerAddress>>{
                      OwnerOf(0), OwnerOf(1), OwnerOf(2)};
                },
            .confirm_own = [this] { return own_; },
            .answers = [this] { return answers_; }};
  }

  OwnerAddress OwnerOf(int log) {
    const auto owner = owners_.find(log);
    if (owner == owners_.end()) return std::nullopt;
    return owner->second;
  }

  static std::string AddressIn(const absl::Status& status) {
    const std::optional<Reason> reason = FindReason(status);
    if (!reason || reason->name != "MOVED") return "";
    return reason->values.at("address");
  }

  static bool None() { return false; }

  MemoryObjects objects_;
  MemoryStore store_{&objects_};
  std::map<int, std::string> owners_ = {{0, "zero:1"}, {1, "one:1"}};
  absl::Status own_;
  bool answers_ = true;
  uint64_t epoch_ = 0;
  Directory zero_{&store_, LogsOf(0)};
  Directory one_{&store_, LogsOf(1)};
};

TEST_F(DirectoryTest, OneLogHasAName) {
  ASSERT_THAT(zero_.Claim("t/a"), IsOk());
  zero_.EndClaim("t/a");
  EXPECT_THAT(zero_.Find("t/a"), IsOk());
  EXPECT_EQ(AddressIn(one_.Find("t/a")), "zero:1");
  EXPECT_EQ(AddressIn(one_.Claim("t/a")), "zero:1");
  EXPECT_THAT(one_.Find("t/other"), IsOk());
  // A call that is repeated after a crash finds its own entry.
  EXPECT_THAT(zero_.Claim("t/a"), IsOk());
}

TEST_F(DirectoryTest, RemembersWhereAdaptersAre) {
  ASSERT_THAT(zero_.Claim("t/a"), IsOk());
  EXPECT_EQ(one_.memory().OwnerOf("t/a"), "");
  EXPECT_EQ(AddressIn(one_.Find("t/a")), "zero:1");
  EXPECT_EQ(one_.memory().OwnerOf("t/a"), "zero:1");
  // The adapter is gone, or has come here.
  zero_.EndClaim("t/a");
  ASSERT_THAT(zero_.Free("t/a", None), IsOk());
  EXPECT_THAT(one_.Find("t/a"), IsOk());
  EXPECT_EQ(one_.memory().OwnerOf("t/a"), "");
}

// The models of a session are in one log.
TEST_F(DirectoryTest, ASessionHasOneEntry) {
  const std::string session(32, 's');
  ASSERT_THAT(zero_.Claim("t~" + session + ".train.0"), IsOk());
  zero_.EndClaim("t~" + session + ".train.0");
  EXPECT_EQ(AddressIn(one_.Claim("t~" + session + ".train.1")), "zero:1");
  EXPECT_EQ(AddressIn(one_.Find(session)), "zero:1");
  EXPECT_EQ(one_.memory().OwnerOf(session), "zero:1");
  ASSERT_THAT(zero_.Restore({session, session + ".train.2"}), IsOk());
  EXPECT_EQ(store_.List("", "", store::kAllObjects)->size(), 1u);
  // A claim of one model keeps the entry for all.
  ASSERT_THAT(zero_.Claim(session + ".train.1"), IsOk());
  ASSERT_THAT(zero_.Free(session + ".train.0", None), IsOk());
  EXPECT_EQ(AddressIn(one_.Find(session)), "zero:1");
  zero_.EndClaim(session + ".train.1");
  ASSERT_THAT(zero_.Free(session + ".train.0", None), IsOk());
  EXPECT_THAT(one_.Find(session), IsOk());
}

TEST_F(DirectoryTest, FindsTheOwnerOfASession) {
  const std::string session(32, 's');
  const auto owner = [this](const std::string& unit, int home) {
    std::promise<absl::StatusOr<std::string>> found;
    one_.FindOwner(unit, home, [&](const absl::StatusOr<std::string>& address) {
      found.set_value(address);
    });
    return found.get_future().get();
  };
  // Without an entry it is where its id says.
  EXPECT_EQ(owner("", 0).value(), "zero:1");
  EXPECT_TRUE(absl::IsNotFound(owner("", 1).status()));
  EXPECT_TRUE(absl::IsNotFound(owner(session, 1).status()));
  EXPECT_TRUE(absl::IsNotFound(owner(session, 7).status()));
  ASSERT_THAT(zero_.Claim(session), IsOk());
  EXPECT_EQ(owner(session, 1).value(), "zero:1");
  // It is remembered for a while.
  answers_ = false;
  EXPECT_EQ(owner(session, 1).value(), "zero:1");
  one_.memory().Forget(session);
  EXPECT_TRUE(absl::IsUnavailable(owner(session, 1).status()));
}

TEST_F(DirectoryTest, AllLogsUseTheBytesThatCameFirst) {
  EXPECT_EQ(zero_.Agree("secret", "first").value(), "first");
  EXPECT_EQ(one_.Agree("secret", "second").value(), "first");
  EXPECT_EQ(zero_.Agree("secret", "third").value(), "first");
  EXPECT_EQ(one_.Agree("other", "second").value(), "second");
}

TEST_F(DirectoryTest, AnOwnerThatIsNotKnownMayComeLater) {
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  owners_[0] = "";
  const absl::Status found = one_.Find("a");
  EXPECT_TRUE(absl::IsUnavailable(found));
  EXPECT_EQ(FindReason(found)->name, "STANDBY");
}

TEST_F(DirectoryTest, AFreedNameIsAnybodys) {
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  zero_.EndClaim("a");
  ASSERT_THAT(zero_.Free("a", None), IsOk());
  EXPECT_THAT(objects_.objects, IsEmpty());
  EXPECT_THAT(one_.Claim("a"), IsOk());
  // Another log's name stays.
  ASSERT_THAT(zero_.Free("a", None), IsOk());
  EXPECT_EQ(AddressIn(zero_.Find("a")), "one:1");
}

TEST_F(DirectoryTest, ANameInUseIsNotFreed) {
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  // An adapter was deleted, and one with the same name is about to be made.
  ASSERT_THAT(zero_.Free("a", None), IsOk());
  EXPECT_EQ(AddressIn(one_.Find("a")), "zero:1");
  // Of two claims one has ended without an adapter.
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  zero_.EndClaim("a");
  ASSERT_THAT(zero_.Free("a", None), IsOk());
  EXPECT_EQ(AddressIn(one_.Find("a")), "zero:1");
  zero_.EndClaim("a");
  ASSERT_THAT(zero_.Free("a", [] { return true; }), IsOk());
  EXPECT_EQ(AddressIn(one_.Find("a")), "zero:1");
}

TEST_F(DirectoryTest, MovedNamesTheAdapterAlone) {
  ASSERT_THAT(zero_.Claim("t/a"), IsOk());
  const Reason reason = *FindReason(one_.Find("t/a"));
  EXPECT_EQ(reason.values.at("adapter"), "t/a");
}

TEST_F(DirectoryTest, AnOwnerThatLostItsLogKnowsNothing) {
  own_ = absl::AbortedError("another process has the log");
  EXPECT_TRUE(absl::IsUnavailable(zero_.Find("a")));
}

TEST_F(DirectoryTest, AnOwnerThatLostItsLogFreesNothing) {
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  zero_.EndClaim("a");
  own_ = absl::AbortedError("another process has the log");
  EXPECT_TRUE(absl::IsUnavailable(zero_.Free("a", None)));
  EXPECT_EQ(objects_.objects.size(), 1);
}

TEST_F(DirectoryTest, AStoreThatIsAwayIsNoAnswer) {
  objects_.read_error = absl::DeadlineExceededError("late");
  const absl::Status found = zero_.Find("a");
  EXPECT_TRUE(absl::IsUnavailable(found));
  EXPECT_THAT(found.message(), HasSubstr("late"));
  objects_.read_error = absl::OkStatus();
  objects_.fate = [](const auto&, const auto&) { return Fate::kRefused; };
  EXPECT_TRUE(absl::IsUnavailable(zero_.Claim("a")));
}

TEST_F(DirectoryTest, ALostAnswerLeavesAnEntryThatTheNextClaimFinds) {
  objects_.fate = [](const auto&, const auto&) { return Fate::kLost; };
  EXPECT_TRUE(absl::IsUnavailable(zero_.Claim("a")));
  objects_.fate = nullptr;
  EXPECT_THAT(zero_.Claim("a"), IsOk());
}

TEST_F(DirectoryTest, ADamagedEntryIsNamed) {
  ASSERT_THAT(store_.Create("adapters/a", {"{}"}), IsOk());
  const absl::Status found = zero_.Find("a");
  EXPECT_TRUE(absl::IsDataLoss(found));
  EXPECT_THAT(found.message(), HasSubstr("adapters/a"));
  // The next adapter with the name mends it.
  EXPECT_THAT(one_.Claim("a"), IsOk());
  EXPECT_EQ(AddressIn(zero_.Find("a")), "one:1");
}

TEST_F(DirectoryTest, ADeletionThatComesLateSparesANewerEntry) {
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  zero_.EndClaim("a");
  // While the first owner frees the name, the next one makes an adapter.
  Directory next(&store_, LogsOf(0));
  objects_.before = [&, first = true](const std::string& operation,
                                      const std::string&) mutable {
    if (operation != "delete" || !std::exchange(first, false)) return;
    EXPECT_THAT(next.Claim("a"), IsOk());
  };
  ASSERT_THAT(zero_.Free("a", None), IsOk());
  EXPECT_EQ(AddressIn(one_.Find("a")), "zero:1");
}

TEST_F(DirectoryTest, AStoreThatDoesNotAnswerIsNotAsked) {
  objects_.before = [](const std::string&, const std::string&) { FAIL(); };
  answers_ = false;
  EXPECT_TRUE(absl::IsUnavailable(zero_.Find("a")));
  EXPECT_TRUE(absl::IsUnavailable(zero_.Claim("a")));
  EXPECT_TRUE(absl::IsUnavailable(zero_.OtherOwners().status()));
}

TEST_F(DirectoryTest, RestoresTheNamesThatHaveNoEntry) {
  ASSERT_THAT(one_.Claim("b"), IsOk());
  ASSERT_THAT(zero_.Restore({"a", "b"}), IsOk());
  EXPECT_EQ(AddressIn(one_.Find("a")), "zero:1");
  EXPECT_EQ(AddressIn(zero_.Find("b")), "one:1");
  // No claim is left, so that the name can be freed.
  ASSERT_THAT(zero_.Free("a", None), IsOk());
  EXPECT_THAT(one_.Find("a"), IsOk());
}

TEST_F(DirectoryTest, OfTwoLogsOneTakesAnEntry) {
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  zero_.EndClaim("a");
  const std::string version = zero_.Read("a")->version();
  EXPECT_EQ(one_.Take("a", version).value(), true);
  EXPECT_EQ(zero_.Take("a", version).value(), false);
  const Directory::Entry entry = zero_.Read("a").value();
  EXPECT_EQ(entry.log, 1);
  EXPECT_TRUE(entry.IsOf(version));
  EXPECT_EQ(AddressIn(zero_.Find("a")), "one:1");
  // The next owner of the log finds out that it has it.
  Directory next(&store_, LogsOf(1));
  EXPECT_EQ(next.Take("a", version).value(), true);
  // It goes back, and what was decided before decides no more.
  EXPECT_EQ(zero_.Take("a", entry.version()).value(), true);
  EXPECT_EQ(next.Take("a", version).value(), false);
}

TEST_F(DirectoryTest, AClaimKeepsWhatDecidesAMove) {
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  const std::string version = zero_.Read("a")->version();
  // A claim of the receiver, after its answer was lost.
  ASSERT_TRUE(one_.Take("a", version).value());
  ASSERT_THAT(one_.Claim("a"), IsOk());
  EXPECT_EQ(one_.Take("a", version).value(), true);
  EXPECT_TRUE(zero_.Read("a")->IsOf(version));
}

TEST_F(DirectoryTest, AnEntryOfTheSameLogThatWasNotTakenIsAnotherAdapters) {
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  zero_.EndClaim("a");
  const std::string version = zero_.Read("a")->version();
  ASSERT_THAT(zero_.Free("a", None), IsOk());
  EXPECT_EQ(one_.Take("a", version).value(), false);
  ASSERT_THAT(one_.Claim("a"), IsOk());
  EXPECT_EQ(one_.Take("a", version).value(), false);
}

TEST_F(DirectoryTest, ATakeWhoseAnswerIsLostIsFoundByTheNext) {
  ASSERT_THAT(zero_.Claim("a"), IsOk());
  const std::string version = zero_.Read("a")->version();
  objects_.fate = [](const auto&, const auto&) { return Fate::kLost; };
  EXPECT_TRUE(absl::IsUnavailable(one_.Take("a", version).status()));
  objects_.fate = nullptr;
  EXPECT_EQ(one_.Take("a", version).value(), true);
  objects_.fate = [](const auto&, const auto&) { return Fate::kRepeated; };
  EXPECT_EQ(zero_.Take("a", one_.Read("a")->version()).value(), true);
  answers_ = false;
  EXPECT_TRUE(absl::IsUnavailable(zero_.Take("a", version).status()));
}

TEST_F(DirectoryTest, KnowsWhetherALogHasAServer) {
  EXPECT_THAT(zero_.CheckOwned(1), IsOk());
  EXPECT_TRUE(absl::IsUnavailable(zero_.CheckOwned(2)));
  owners_[1] = "";
  EXPECT_THAT(zero_.CheckOwned(1),
              IsStatus(absl::StatusCode::kUnavailable, "log 1"));
}

TEST_F(DirectoryTest, ListsTheOwnersOfOtherLogs) {
  EXPECT_THAT(zero_.OtherOwners().value(), ElementsAre("one:1"));
  owners_[2] = "two:1";
  EXPECT_THAT(zero_.OtherOwners().value(), ElementsAre("one:1", "two:1"));
  owners_[1] = "";
  EXPECT_TRUE(absl::IsUnavailable(zero_.OtherOwners().status()));
}

}  // namespace
}  // namespace weft::directory
