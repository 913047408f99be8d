#include "src/dispatch/residency.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/adapter_keys.h"

namespace weft::dispatch {
namespace {

using ::testing::ElementsAre;
using enum AdapterLocation;

// Each adapter has ten bytes, and its work is in demands_.
class ResidencyTest : public ::testing::Test {
 protected:
  void Start(int max_resident, uint64_t host_bytes = 0,
             uint64_t device_bytes = 0) {
    residency_.emplace(ResidencyOptions{.max_resident = max_resident,
                                        .host_bytes = host_bytes,
                                        .device_bytes = device_bytes});
  }

  std::optional<Move> Next() {
    return residency_->Next(
        [this](AdapterKey adapter) { return demands_[NameOf(adapter)]; },
        [](AdapterKey) { return uint64_t{10}; });
  }

  // Asks for a slot and creates the adapter in it. Returns the moves as text.
  std::vector<std::string> Create(const std::string& adapter) {
    residency_->WantSlot(++tickets_);
    std::vector<std::string> moves = Settle();
    Add(adapter);
    return moves;
  }

  void Add(const std::string& adapter) {
    residency_->Add(Key(adapter));
    demands_[adapter] = {};
  }

  std::vector<std::string> Want(const std::string& adapter) {
    demands_[adapter].ready = kTraining;
    residency_->Want(Key(adapter));
    return Settle();
  }

  void Serve(const std::string& adapter) {
    EXPECT_TRUE(residency_->CanRun(Key(adapter))) << adapter;
    demands_[adapter].ready = 0;
    residency_->Used(Key(adapter), kTraining);
  }

  // Makes moves until the policy has none. Each move succeeds at once.
  std::vector<std::string> Settle() {
    std::vector<std::string> moves;
    while (const std::optional<Move> move = Next()) {
      moves.push_back(Text(*move));
      if (move->ticket == 0) {
        EXPECT_FALSE(residency_->Finished(*move, true).has_value());
      }
    }
    return moves;
  }

  static std::string Text(const Move& move) {
    if (move.ticket > 0) return "slot";
    constexpr const char* kNames[] = {"device", "host", "disk"};
    return NameOf(move.adapter) + " to " + kNames[static_cast<size_t>(move.to)];
  }

  std::optional<Residency> residency_;
  std::map<std::string, Demand> demands_;
  uint64_t tickets_ = 0;
};

TEST_F(ResidencyTest, NothingMovesWhileThereIsRoom) {
  Start(2);
  EXPECT_THAT(Create("a"), ElementsAre("slot"));
  EXPECT_THAT(Create("b"), ElementsAre("slot"));
  EXPECT_THAT(Want("a"), ElementsAre());
  EXPECT_THAT(residency_->Counts(), ElementsAre(2, 0, 0));
}

TEST_F(ResidencyTest, TheLeastRecentlyUsedLeaves) {
  Start(2);
  Create("a");
  Create("b");
  Serve("a");
  EXPECT_THAT(Create("c"), ElementsAre("b to disk", "slot"));
  EXPECT_EQ(residency_->LocationOf(Key("b")), kDisk);
  EXPECT_THAT(Want("b"), ElementsAre("a to disk", "b to device"));
  EXPECT_THAT(residency_->Counts(), ElementsAre(2, 0, 1));
}

TEST_F(ResidencyTest, WhoHasWorkOnTheDeviceStays) {
  Start(1);
  Create("a");
  demands_["a"].busy = true;
  residency_->WantSlot(9);
  EXPECT_FALSE(Next().has_value());
  demands_["a"].busy = false;
  EXPECT_THAT(Settle(), ElementsAre("a to disk", "slot"));
}

TEST_F(ResidencyTest, WhoHasWaitingWorkLeavesOnlyWhenAllHaveSome) {
  Start(2);
  Create("a");
  Create("b");
  Serve("a");
  Serve("b");
  demands_["a"].ready = kTraining;
  EXPECT_THAT(Create("c"), ElementsAre("b to disk", "slot"));
}

TEST_F(ResidencyTest, WhoHasWaitingWorkIsServedBeforeItLeavesAndComesBack) {
  Start(1);
  Create("a");
  Want("a");
  residency_->WantSlot(9);
  EXPECT_FALSE(Next().has_value()) << "a was not served yet";
  Serve("a");
  demands_["a"].ready = kTraining;
  EXPECT_THAT(Settle(), ElementsAre("a to disk", "slot"));
  Add("b");
  EXPECT_THAT(Settle(), ElementsAre("b to disk", "a to device"));
}

TEST_F(ResidencyTest, SlotsAreGivenInTheOrderOfAsking) {
  Start(1);
  for (const char* adapter : {"a", "b", "c", "d"}) Create(adapter);
  Want("d");
  for (const char* adapter : {"c", "a", "b"}) {
    EXPECT_THAT(Want(adapter), ElementsAre());
  }
  Serve("d");
  EXPECT_THAT(Settle(), ElementsAre("d to disk", "c to device"));
  Serve("c");
  EXPECT_THAT(Settle(), ElementsAre("c to disk", "a to device"));
  Serve("a");
  EXPECT_THAT(Settle(), ElementsAre("a to disk", "b to device"));
}

TEST_F(ResidencyTest, WhoseWorkIsGoneNoLongerWaits) {
  Start(1);
  Create("a");
  Create("b");
  demands_["b"].busy = true;
  Want("a");
  EXPECT_TRUE(residency_->has_waiters());
  demands_["a"].ready = 0;
  demands_["b"].busy = false;
  EXPECT_FALSE(Next().has_value());
  EXPECT_FALSE(residency_->has_waiters());
  EXPECT_THAT(Want("a"), ElementsAre("b to disk", "a to device"));
}

TEST_F(ResidencyTest, HostBuffersFillFirstAndTheirOldestGoToDisk) {
  Start(1, /*host_bytes=*/25);
  Create("a");
  EXPECT_THAT(Create("b"), ElementsAre("a to host", "slot"));
  EXPECT_THAT(Create("c"), ElementsAre("b to host", "slot"));
  EXPECT_THAT(Create("d"), ElementsAre("a to disk", "c to host", "slot"));
  EXPECT_THAT(residency_->Counts(), ElementsAre(1, 2, 1));
  EXPECT_THAT(Want("a"), ElementsAre("b to disk", "d to host", "a to device"));
}

TEST_F(ResidencyTest, WhatNoHostBufferHoldsGoesToDisk) {
  Start(1, /*host_bytes=*/9);
  Create("a");
  EXPECT_THAT(Create("b"), ElementsAre("a to disk", "slot"));
}

TEST_F(ResidencyTest, WhoIsOnTheWayOutArrivesBeforeItTurnsBack) {
  Start(1);
  Create("a");
  residency_->WantSlot(9);
  const std::optional<Move> out = Next();
  ASSERT_EQ(Text(out.value()), "a to disk");
  EXPECT_FALSE(residency_->CanRun(Key("a")));
  EXPECT_EQ(residency_->LocationOf(Key("a")), kDevice);
  EXPECT_THAT(Want("a"), ElementsAre());
  EXPECT_FALSE(residency_->Finished(*out, true).has_value());
  EXPECT_THAT(Settle(), ElementsAre("slot"));
  Add("b");
  EXPECT_THAT(Settle(), ElementsAre("b to disk", "a to device"));
}

TEST_F(ResidencyTest, WhoCannotLeaveStaysAndTheFirstInLineIsTold) {
  Start(1);
  Create("a");
  residency_->WantSlot(8);
  residency_->WantSlot(9);
  const std::optional<Move> out = Next();
  // Work arrives while the adapter is about to leave. The work can run after
  // the move has failed.
  demands_["a"].ready = kTraining;
  EXPECT_TRUE(residency_->Want(Key("a")));
  const std::optional<SlotWaiter> failed = residency_->Finished(*out, false);
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->ticket, 8u);
  EXPECT_TRUE(residency_->CanRun(Key("a")));
  Serve("a");
  EXPECT_THAT(Settle(), ElementsAre("a to disk", "slot"));
  EXPECT_FALSE(residency_->has_waiters());
}

TEST_F(ResidencyTest, AFailedMoveFailsNoAdapterThatStillMovesAway) {
  Start(2);
  Create("a");
  Create("b");
  residency_->WantSlot(8);
  ASSERT_EQ(Text(Next().value()), "a to disk");
  EXPECT_THAT(Want("a"), ElementsAre());
  residency_->Remove(Key("b"));
  ASSERT_EQ(Text(Next().value()), "slot");
  Add("c");
  // The adapter "a" is first in line, but needs no slot yet.
  residency_->WantSlot(9);
  residency_->WantSlot(10);
  const std::optional<Move> out = Next();
  ASSERT_EQ(Text(out.value()), "c to disk");
  const std::optional<SlotWaiter> failed = residency_->Finished(*out, false);
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->ticket, 9u);
}

TEST_F(ResidencyTest, WhoCannotComeInFreesItsSlotAndMayAskAgain) {
  Start(1);
  Create("a");
  Create("b");
  residency_->Remove(Key("b"));
  demands_["a"].ready = kTraining;
  EXPECT_TRUE(residency_->Want(Key("a")));
  const std::optional<Move> in = Next();
  ASSERT_EQ(Text(in.value()), "a to device");
  EXPECT_FALSE(residency_->Want(Key("a"))) << "it is on its way";
  const std::optional<SlotWaiter> failed = residency_->Finished(*in, false);
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(NameOf(failed->adapter), "a");
  EXPECT_EQ(residency_->LocationOf(Key("a")), kDisk);
  EXPECT_FALSE(Next().has_value());
  EXPECT_THAT(Want("a"), ElementsAre("a to device"));
}

TEST_F(ResidencyTest, WhoIsRemovedWhileItMovesFreesItsSlot) {
  Start(1);
  Create("a");
  residency_->WantSlot(9);
  const std::optional<Move> out = Next();
  ASSERT_TRUE(residency_->IsUnderway(out.value()));
  EXPECT_TRUE(residency_->Remove(Key("a")));
  EXPECT_FALSE(residency_->Remove(Key("a")));
  EXPECT_FALSE(residency_->IsUnderway(*out));
  EXPECT_THAT(Settle(), ElementsAre("slot"));
  Add("a");
  // The end of the old move does not affect a new adapter with the same name.
  EXPECT_FALSE(residency_->Finished(*out, true).has_value());
  EXPECT_TRUE(residency_->CanRun(Key("a")));
}

TEST_F(ResidencyTest, ASlotThatWasNotUsedIsFree) {
  Start(1);
  residency_->WantSlot(8);
  residency_->WantSlot(9);
  EXPECT_THAT(Settle(), ElementsAre("slot"));
  residency_->ReturnSlot();
  EXPECT_THAT(Settle(), ElementsAre("slot"));
}

TEST_F(ResidencyTest, AdaptersThatFillTheMemoryMakeRoomBesideFreeSlots) {
  Start(/*max_resident=*/8, /*host_bytes=*/0, /*device_bytes=*/15);
  EXPECT_THAT(Create("a"), ElementsAre("slot"));
  EXPECT_THAT(Create("b"), ElementsAre("slot"));
  EXPECT_THAT(Create("c"), ElementsAre("a to disk", "slot"));
  EXPECT_THAT(Want("a"), ElementsAre("b to disk", "a to device"));
}

TEST_F(ResidencyTest, AnAdapterThatIsLargerThanTheMemoryComesInAlone) {
  Start(/*max_resident=*/8, /*host_bytes=*/0, /*device_bytes=*/5);
  EXPECT_THAT(Create("a"), ElementsAre("slot"));
  EXPECT_THAT(Create("b"), ElementsAre("a to disk", "slot"));
}

TEST_F(ResidencyTest, PinnedAdaptersComeInTogetherWhateverTheyHold) {
  Start(/*max_resident=*/3, /*host_bytes=*/0, /*device_bytes=*/5);
  for (const char* name : {"a", "b"}) {
    residency_->AddOnDisk(Key(name));
    demands_[name].busy = true;
  }
  EXPECT_THAT(Want("a"), ElementsAre("a to device"));
  EXPECT_THAT(Want("b"), ElementsAre("b to device"));
}

// A store that does not answer keeps an adapter away, and nobody else.
TEST_F(ResidencyTest, APostponedAdapterGivesItsSlotBackAndComesWhenItCan) {
  Start(1);
  Create("a");
  residency_->AddOnDisk(Key("far"));
  demands_["far"].ready = kTraining;
  residency_->Want(Key("far"));
  EXPECT_EQ(Text(*Next()), "a to disk");
  ASSERT_FALSE(
      residency_->Finished({.id = 1, .adapter = Key("a"), .to = kDisk}, true));
  const std::optional<Move> far = Next();
  EXPECT_EQ(Text(*far), "far to device");
  residency_->Postpone(*far);
  EXPECT_FALSE(residency_->IsUnderway(*far));
  EXPECT_THAT(Settle(), ElementsAre());
  EXPECT_TRUE(residency_->has_waiters());
  // Another adapter has the slot, and need not leave.
  EXPECT_THAT(Want("a"), ElementsAre("a to device"));
  Serve("a");
  EXPECT_THAT(Settle(), ElementsAre());
  residency_->Resume(Key("far"));
  EXPECT_THAT(Settle(), ElementsAre("a to disk", "far to device"));
  EXPECT_FALSE(residency_->has_waiters());
}

TEST_F(ResidencyTest, APostponedAdapterCanBeRemoved) {
  Start(1);
  residency_->AddOnDisk(Key("far"));
  demands_["far"].ready = kTraining;
  residency_->Want(Key("far"));
  residency_->Postpone(*Next());
  EXPECT_TRUE(residency_->Remove(Key("far")));
  residency_->Resume(Key("far"));
  EXPECT_FALSE(residency_->has_waiters());
  EXPECT_THAT(Create("b"), ElementsAre("slot"));
}

}  // namespace
}  // namespace weft::dispatch
