#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "src/parallel/communicator.h"
#include "tests/support/ranks.h"
#include "tests/support/status_matchers.h"

namespace weft::parallel {
namespace {

TEST(AgreementTest, AllIsWellWhenItIsForEveryRank) {
  RunRanks(3, [](Communicator& group) {
    EXPECT_THAT(Agree(group, absl::OkStatus()), IsOk());
  });
}

TEST(AgreementTest, EveryRankGetsTheFirstErrorAndWhoseItIs) {
  RunRanks(4, [](Communicator& group) {
    absl::Status own;
    if (group.shard().rank == 2) own = absl::DataLossError("x.bin is damaged");
    if (group.shard().rank == 3) own = absl::NotFoundError("no such folder");
    EXPECT_THAT(Agree(group, own), IsStatus(absl::StatusCode::kDataLoss,
                                            "rank 2: x.bin is damaged"));
    // The group still works.
    EXPECT_THAT(Agree(group, absl::OkStatus()), IsOk());
  });
}

TEST(AgreementTest, ALongMessageIsCut) {
  RunRanks(2, [](Communicator& group) {
    const absl::Status status =
        Agree(group, group.shard().rank == 0
                         ? absl::OkStatus()
                         : absl::InternalError(std::string(5000, 'm')));
    EXPECT_EQ(status.message(), "rank 1: " + std::string(1024, 'm'));
  });
}

TEST(AgreementTest, SmallestIsThatOfAllRanks) {
  RunRanks(3, [](Communicator& group) {
    constexpr int64_t kLarge = int64_t{1} << 40;
    EXPECT_EQ(Smallest(group, kLarge - group.shard().rank), kLarge - 2);
  });
}

}  // namespace
}  // namespace weft::parallel
