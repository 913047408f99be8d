#include "src/base/status_macros.h"

#include <memory>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace weft {
namespace {

absl::StatusOr<std::unique_ptr<int>> Make(int value) {
  if (value < 0) return absl::InvalidArgumentError("value is negative");
  return std::make_unique<int>(value);
}

absl::StatusOr<int> Sum(int a, int b, int* evaluations) {
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<int> first, Make(a));
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<int> second, (++*evaluations, Make(b)));
  return *first + *second;
}

absl::Status Check(const absl::Status& status, bool* reached) {
  WEFT_RETURN_IF_ERROR(status);
  *reached = true;
  return absl::OkStatus();
}

TEST(StatusMacrosTest, AssignsMoveOnlyValuesOnce) {
  int evaluations = 0;
  EXPECT_THAT(Sum(2, 3, &evaluations), IsOkAndHolds(5));
  EXPECT_EQ(evaluations, 1);
}

TEST(StatusMacrosTest, ReturnsTheFirstErrorAndStops) {
  int evaluations = 0;
  EXPECT_THAT(Sum(-1, 3, &evaluations),
              IsStatus(absl::StatusCode::kInvalidArgument, "negative"));
  EXPECT_EQ(evaluations, 0);
}

TEST(StatusMacrosTest, ReturnsOnlyErrors) {
  bool reached = false;
  EXPECT_THAT(Check(absl::NotFoundError("gone"), &reached),
              IsStatus(absl::StatusCode::kNotFound, "gone"));
  EXPECT_FALSE(reached);
  EXPECT_THAT(Check(absl::OkStatus(), &reached), IsOk());
  EXPECT_TRUE(reached);
}

}  // namespace
}  // namespace weft
