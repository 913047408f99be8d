// Tests how tenants share the slots and pages of the decode loop. A loop in
// these tests has 8 slots and 80 pages.
#include "src/dispatch/decode_order.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace weft::dispatch {
namespace {

class DecodeOrderTest : public ::testing::Test {
 protected:
  // Returns the members in order, as their tenants and ages: "a1 b3". In
  // `members`, oldest first, "a a:30 b" are members of the tenants a, a and b,
  // and the second one has 30 pages. Ages count from `first_age`.
  std::string Order(const std::string& members, uint64_t first_age = 1) {
    std::vector<DecodeOrder::Member> line;
    for (const auto word : absl::StrSplit(members, ' ')) {
      const std::vector<std::string> parts = absl::StrSplit(word, ':');
      int64_t pages = 1;
      if (parts.size() > 1) {
        EXPECT_TRUE(absl::SimpleAtoi(parts[1], &pages));
      }
      line.push_back({.tenant = parts[0],
                      .age = {first_age + line.size(), 0},
                      .slots = 1,
                      .pages = pages});
    }
    const std::vector<DecodeOrder::Place> places = order_.Places(line);
    std::map<DecodeOrder::Place, std::string> names;
    for (size_t i = 0; i < line.size(); ++i) {
      names[places[i]] = absl::StrCat(line[i].tenant, line[i].age.first);
    }
    return absl::StrJoin(names, " ", [](std::string* out, const auto& entry) {
      absl::StrAppend(out, entry.second);
    });
  }

  DecodeOrder order_{/*slots=*/8, /*pages=*/80, {{"heavy", 3}}};
};

TEST_F(DecodeOrderTest, OneTenantIsServedByAge) {
  EXPECT_EQ(Order("a a:40 a a:9"), "a1 a2 a3 a4");
}

TEST_F(DecodeOrderTest, TenantsTakeTurns) {
  EXPECT_EQ(Order("a a a a b b"), "a1 b5 a2 b6 a3 a4");
  EXPECT_EQ(Order("a a a a b b c"), "a1 b5 c7 a2 b6 a3 a4");
}

TEST_F(DecodeOrderTest, AHeavyTenantHasMoreTurns) {
  EXPECT_EQ(Order("a a a heavy heavy heavy heavy heavy"),
            "a1 heavy4 heavy5 heavy6 a2 heavy7 heavy8 a3");
}

TEST_F(DecodeOrderTest, ManyPagesCountAsManySlots) {
  EXPECT_EQ(Order("a:30 a b b b b"), "a1 b3 b4 b5 a2 b6");
}

// Four slots of tenants, and one more: the one whose first member ends goes
// behind the others, although its next member is older than theirs.
TEST_F(DecodeOrderTest, FirstMembersOfTenantsTakeTurns) {
  EXPECT_EQ(Order("a a b"), "a1 b3 a2");
  EXPECT_EQ(Order("a b", 2), "b3 a2");
  EXPECT_EQ(Order("a b b", 2), "b3 a2 b4");
}

}  // namespace
}  // namespace weft::dispatch
