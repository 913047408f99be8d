// Tests the matchers of tests/support.
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace weft {
namespace {

TEST(StatusMatchersTest, TellCodeAndMessageApart) {
  const absl::Status status = absl::NotFoundError("no adapter \"a\"");
  const absl::StatusOr<int> result = status;
  EXPECT_THAT(status, IsStatus(absl::StatusCode::kNotFound, "adapter"));
  EXPECT_THAT(result, IsStatus(absl::StatusCode::kNotFound, ""));
  EXPECT_THAT(status,
              testing::Not(IsStatus(absl::StatusCode::kInternal, "adapter")));
  EXPECT_THAT(status,
              testing::Not(IsStatus(absl::StatusCode::kNotFound, "step")));
  EXPECT_THAT(result, testing::Not(IsOk()));
  EXPECT_THAT(absl::StatusOr<int>(3), IsOkAndHolds(3));
  EXPECT_THAT(absl::StatusOr<int>(4), testing::Not(IsOkAndHolds(3)));
}

}  // namespace
}  // namespace weft
