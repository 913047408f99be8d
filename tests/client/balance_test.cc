#include "client/weftctl/balance.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft::client::weftctl {
namespace {

using ::testing::ElementsAre;

void AddTo(v1::ListAdaptersResponse& list, const std::string& id,
           double last_used_at, v1::Durability durability,
           bool restoring = false) {
  v1::Adapter& one = *list.add_adapters();
  one.set_adapter_id(id);
  one.set_last_used_at(last_used_at);
  one.set_durability(durability);
  one.set_restoring(restoring);
}

// A log with so many adapters, all of which may leave.
LogLoad Load(int log, size_t num_adapters) {
  LogLoad load = {.log = log, .num_adapters = num_adapters};
  for (size_t i = 0; i < num_adapters; ++i) {
    load.movable.push_back({.adapter_id = absl::StrCat(log, "-", i)});
  }
  return load;
}

std::vector<std::string> Names(const LogLoad& load) {
  std::vector<std::string> names;
  for (const MovableUnit& unit : load.movable) names.push_back(unit.adapter_id);
  return names;
}

// Makes all moves, and returns how many adapters each log has in the end.
std::vector<size_t> Balanced(std::vector<LogLoad> logs) {
  while (const auto move = NextMove(logs)) {
    --logs[move->from].num_adapters;
    ++logs[move->to].num_adapters;
  }
  std::vector<size_t> counts;
  for (const LogLoad& one : logs) counts.push_back(one.num_adapters);
  return counts;
}

TEST(BalanceTest, TheLongestUnusedLeavesFirst) {
  v1::ListAdaptersResponse list;
  AddTo(list, "trains", 30, v1::DURABILITY_STEP);
  AddTo(list, "idle", 10, v1::DURABILITY_STEP);
  AddTo(list, "brief", 5, v1::DURABILITY_MEMORY);
  AddTo(list, "comes", 5, v1::DURABILITY_STEP, /*restoring=*/true);
  AddTo(list, "rests", 20, v1::DURABILITY_STEP);
  std::vector<LogLoad> logs = {LoadOf(3, list), Load(4, 0)};
  EXPECT_EQ(logs[0].num_adapters, 5);
  const auto move = NextMove(logs);
  ASSERT_TRUE(move);
  EXPECT_EQ(move->adapter_id, "idle");
  EXPECT_EQ(logs[move->from].log, 3);
  EXPECT_EQ(logs[move->to].log, 4);
  EXPECT_THAT(Names(logs[0]), ElementsAre("trains", "rests"));
}

TEST(BalanceTest, ASessionMovesWholeAndOnlyIfThatHelps) {
  const std::string big(32, 'b');
  const std::string small(32, 's');
  const auto list_of = [&](int num_single) {
    v1::ListAdaptersResponse list;
    for (int i = 0; i < 4; ++i) {
      AddTo(list, absl::StrCat(big, ".train.", i), 1, v1::DURABILITY_STEP);
    }
    AddTo(list, small + ".train.0", 9, v1::DURABILITY_STEP);
    AddTo(list, "t~" + small + ".train.1", 2, v1::DURABILITY_STEP);
    for (int i = 0; i < num_single; ++i) {
      AddTo(list, absl::StrCat("a", i), 20, v1::DURABILITY_STEP);
    }
    return list;
  };
  // All of a session count, by the use of the latest.
  const LogLoad load = LoadOf(0, list_of(1));
  EXPECT_EQ(load.num_adapters, 7);
  EXPECT_THAT(Names(load), ElementsAre("a0", "t~" + small + ".train.1",
                                       absl::StrCat(big, ".train.3")));
  // Four would be as many as remain here are too few.
  std::vector<LogLoad> logs = {LoadOf(0, list_of(0)), Load(1, 2)};
  auto move = NextMove(logs);
  ASSERT_TRUE(move);
  EXPECT_EQ(move->adapter_id, "t~" + small + ".train.1");
  logs = {LoadOf(0, list_of(0)), Load(1, 0)};
  move = NextMove(logs);
  ASSERT_TRUE(move);
  EXPECT_EQ(move->adapter_id, big + ".train.3");
  logs = {LoadOf(0, list_of(0)), Load(1, 4)};
  EXPECT_EQ(NextMove(logs), std::nullopt);
}

TEST(BalanceTest, LogsThatDifferLittleStay) {
  EXPECT_THAT(Balanced({}), ElementsAre());
  EXPECT_THAT(Balanced({Load(0, 7)}), ElementsAre(7));
  EXPECT_THAT(Balanced({Load(0, 1), Load(1, 0)}), ElementsAre(1, 0));
  EXPECT_THAT(Balanced({Load(0, 2), Load(1, 0)}), ElementsAre(1, 1));
  EXPECT_THAT(Balanced({Load(0, 0), Load(1, 12), Load(2, 6)}),
              ElementsAre(6, 6, 6));
  // A tenth of the mean, which is 100.
  EXPECT_THAT(Balanced({Load(0, 105), Load(1, 95)}), ElementsAre(105, 95));
  EXPECT_THAT(Balanced({Load(0, 110), Load(1, 90)}), ElementsAre(105, 95));
}

TEST(BalanceTest, ALogThatTakesNothingGivesAdaptersAway) {
  LogLoad full = Load(0, 9);
  full.takes = false;
  EXPECT_THAT(Balanced({full, Load(1, 0), Load(2, 0)}), ElementsAre(3, 3, 3));
  LogLoad empty = Load(0, 0);
  empty.takes = false;
  EXPECT_THAT(Balanced({empty, Load(1, 9), Load(2, 0)}), ElementsAre(0, 5, 4));
}

TEST(BalanceTest, WhatCannotMoveStays) {
  LogLoad fixed = Load(0, 9);
  fixed.movable.resize(2);
  EXPECT_THAT(Balanced({fixed, Load(1, 0), Load(2, 5)}), ElementsAre(7, 3, 4));
}

}  // namespace
}  // namespace weft::client::weftctl
