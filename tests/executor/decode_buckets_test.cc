#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>

#include "src/executor/decode_graph.h"

namespace weft::executor {
namespace {

using ::testing::ElementsAre;

std::set<int64_t> BucketsUpTo(int64_t max_rows) {
  std::set<int64_t> buckets;
  for (int64_t rows = 1; rows <= max_rows; ++rows) {
    buckets.insert(RowBucket(rows, max_rows));
  }
  return buckets;
}

TEST(DecodeBucketsTest, GrowByHalvesAndEndAtTheLargestBatch) {
  EXPECT_THAT(BucketsUpTo(1), ElementsAre(1));
  EXPECT_THAT(BucketsUpTo(64), ElementsAre(1, 2, 4, 8, 16, 24, 32, 48, 64));
  EXPECT_THAT(BucketsUpTo(100),
              ElementsAre(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100));
}

TEST(DecodeBucketsTest, ABatchTakesTheSmallestBucketThatHoldsIt) {
  for (const int64_t most : {1, 7, 64, 100, 4096}) {
    const std::set<int64_t> buckets = BucketsUpTo(most);
    for (int64_t rows = 1; rows <= most; ++rows) {
      const int64_t smallest = *buckets.lower_bound(rows);
      ASSERT_EQ(RowBucket(rows, most), smallest) << rows << " of " << most;
      if (rows > 16) {
        EXPECT_LT(3 * (smallest - rows), smallest) << rows;
      }
    }
  }
}

TEST(DecodeBucketsTest, BoundsOfTokensAreFew) {
  EXPECT_EQ(TokenBound(1), 512);
  EXPECT_EQ(TokenBound(512), 512);
  EXPECT_EQ(TokenBound(513), 2048);
  EXPECT_EQ(TokenBound(100'000), 131'072);
}

}  // namespace
}  // namespace weft::executor
