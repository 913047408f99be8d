#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "src/model/router.h"

namespace weft::model {
namespace {

at::Tensor Longs(std::vector<int64_t> values) {
  return at::tensor(values, at::kLong);
}

// The example in router.h.
TEST(SortByExpertTest, PutsTheRowsOfAnExpertTogether) {
  const ExpertRows rows =
      SortByExpert(Longs({2, 0, 0, 1, 2, 0}).view({3, 2}), {.count = 3}, {});
  EXPECT_TRUE(at::equal(rows.tokens_N, Longs({0, 1, 2, 1, 0, 2})));
  EXPECT_TRUE(at::equal(rows.pairs_N, Longs({1, 2, 5, 3, 0, 4})));
  EXPECT_TRUE(
      at::equal(rows.places_TK, Longs({4, 0, 1, 3, 5, 2}).view({3, 2})));
  ASSERT_EQ(rows.parts.size(), 3u);
  EXPECT_EQ(rows.parts[1].begin, 3);
  EXPECT_EQ(rows.parts[1].end, 4);
}

TEST(SortByExpertTest, ListsOnlyExpertsWithRows) {
  const ExpertRows rows =
      SortByExpert(Longs({5, 5, 2}).view({3, 1}), {.count = 8}, {});
  ASSERT_EQ(rows.parts.size(), 2u);
  EXPECT_EQ(rows.parts[0].expert, 2);
  EXPECT_EQ(rows.parts[1].expert, 5);
  EXPECT_EQ(rows.parts[1].end - rows.parts[1].begin, 2);
}

// Tokens 1 and 2 have one adapter, tokens 4 and 5 another one.
TEST(SortByExpertTest, GivesEveryExpertTheSegmentsOfItsTokens) {
  const auto first = std::make_shared<lora::AdapterVersion>();
  const auto second = std::make_shared<lora::AdapterVersion>();
  const ExpertRows rows =
      SortByExpert(Longs({0, 0, 1, 0, 0, 1}).view({6, 1}), {.count = 2},
                   {{1, 3, first}, {4, 6, second}});
  // Expert 0 has tokens 0, 1, 3, 4; expert 1 has tokens 2 and 5.
  ASSERT_EQ(rows.parts.size(), 2u);
  const lora::LoraRouting& zero = rows.parts[0].routing;
  ASSERT_EQ(zero.size(), 2u);
  EXPECT_EQ(zero[0].begin, 1);
  EXPECT_EQ(zero[0].end, 2);
  EXPECT_EQ(zero[0].version, first);
  EXPECT_EQ(zero[1].begin, 3);
  EXPECT_EQ(zero[1].end, 4);
  EXPECT_EQ(zero[1].version, second);
  const lora::LoraRouting& one = rows.parts[1].routing;
  ASSERT_EQ(one.size(), 2u);
  EXPECT_EQ(one[0].begin, 0);
  EXPECT_EQ(one[1].end, 2);
}

// Two ranks share the experts of the example in router.h.
TEST(SortByExpertTest, LeavesOutTheExpertsOfOtherRanks) {
  const at::Tensor experts_TK = Longs({2, 0, 0, 1, 2, 0}).view({3, 2});
  const ExpertRows first =
      SortByExpert(experts_TK, {.count = 3, .own = {0, 1}}, {});
  EXPECT_TRUE(at::equal(first.tokens_N, Longs({0, 1, 2})));
  EXPECT_TRUE(at::equal(first.pairs_N, Longs({1, 2, 5})));
  EXPECT_TRUE(
      at::equal(first.places_TK, Longs({3, 0, 1, 3, 3, 2}).view({3, 2})));
  const ExpertRows second =
      SortByExpert(experts_TK, {.count = 3, .own = {1, 3}}, {});
  EXPECT_TRUE(at::equal(second.tokens_N, Longs({1, 0, 2})));
  EXPECT_TRUE(
      at::equal(second.places_TK, Longs({1, 3, 3, 0, 2, 3}).view({3, 2})));
  EXPECT_EQ(second.parts.front().expert, 1);
  EXPECT_TRUE(first.has_absent && second.has_absent);
}

TEST(ExpertRowsTest, RowsAreGatheredAndAddedUpInTheOrderOfTheExperts) {
  at::manual_seed(2);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor x_TH = at::randn({3, 37}, dtype);
    const ExpertRows rows =
        SortByExpert(Longs({2, 0, 1, 0, 1, 2, 2, 1, 0}).view({3, 3}),
                     {.count = 3, .own = {1, 3}}, {});
    EXPECT_TRUE(at::equal(GatherRows(x_TH, rows.tokens_N),
                          x_TH.index_select(0, rows.tokens_N)));
    // The places of the absent expert point to the last row.
    const at::Tensor rows_NH = at::randn({7, 37}, dtype);
    const at::Tensor of_TKH =
        rows_NH.index_select(0, rows.places_TK.flatten()).view({3, 3, 37});
    EXPECT_TRUE(at::equal(
        SumOfRows(rows_NH, rows.places_TK),
        of_TKH.select(1, 0) + of_TKH.select(1, 1) + of_TKH.select(1, 2)));
  }
}

TEST(SortByExpertTest, RefusesAnExpertThatDoesNotExist) {
  for (const int64_t expert : {-1, 3}) {
    EXPECT_THROW(
        (void)SortByExpert(Longs({0, expert}).view({2, 1}), {.count = 3}, {}),
        c10::Error);
  }
}

}  // namespace
}  // namespace weft::model
