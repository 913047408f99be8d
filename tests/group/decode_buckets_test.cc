#include "src/group/decode_buckets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace weft::group {
namespace {

using ::testing::ElementsAre;

TEST(DecodeBucketsTest, GrowByHalvesAndEndAtTheLargestBatch) {
  EXPECT_THAT(RowBuckets(1), ElementsAre(1));
  EXPECT_THAT(RowBuckets(64), ElementsAre(1, 2, 4, 8, 16, 24, 32, 48, 64));
  EXPECT_THAT(RowBuckets(100),
              ElementsAre(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100));
}

TEST(DecodeBucketsTest, ABatchTakesTheSmallestBucketThatHoldsIt) {
  for (const int64_t most : {1, 7, 64, 100, 4096}) {
    const std::vector<int64_t> buckets = RowBuckets(most);
    for (int64_t rows = 1; rows <= most; ++rows) {
      const auto smallest =
          std::lower_bound(buckets.begin(), buckets.end(), rows);
      ASSERT_EQ(RowBucket(rows, most), *smallest) << rows << " of " << most;
      if (rows > 16) {
        EXPECT_LT(3 * (*smallest - rows), *smallest) << rows;
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
}  // namespace weft::group
