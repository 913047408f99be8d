#include "src/parallel/shard.h"

#include <gtest/gtest.h>

namespace weft::parallel {
namespace {

TEST(ShardTest, PartsFollowEachOtherAndDifferByAtMostOne) {
  for (int size = 1; size <= 5; ++size) {
    for (int64_t count = 0; count < 20; ++count) {
      int64_t end = 0;
      for (int rank = 0; rank < size; ++rank) {
        const Range part = Shard{.rank = rank, .size = size}.Of(count);
        EXPECT_EQ(part.begin, end);
        EXPECT_GE(part.size(), count / size);
        EXPECT_LE(part.size(), (count + size - 1) / size);
        end = part.end;
      }
      EXPECT_EQ(end, count);
    }
  }
}

}  // namespace
}  // namespace weft::parallel
