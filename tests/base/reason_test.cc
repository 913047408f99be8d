#include "src/base/reason.h"

#include "gtest/gtest.h"

namespace weft {
namespace {

TEST(ReasonTest, TravelsWithTheStatus) {
  const Reason reason{.name = "TOO_LARGE",
                      .values = {{"limit", "a=b"}, {"held", ""}}};
  EXPECT_EQ(FindReason(WithReason(absl::AbortedError("x"), reason)), reason);
  EXPECT_EQ(FindReason(absl::AbortedError("x")), std::nullopt);
}

TEST(ReasonTest, MovedNamesTheOwner) {
  const absl::Status moved = MovedTo("host:5");
  EXPECT_TRUE(absl::IsFailedPrecondition(moved));
  EXPECT_EQ(FindReason(moved),
            (Reason{.name = "MOVED", .values = {{"address", "host:5"}}}));
  EXPECT_NE(moved.message().find("host:5"), std::string::npos);
}

TEST(ReasonTest, MovedMayNameTheOnlyAdapterThatItIsAbout) {
  const absl::Status moved = MovedTo("host:5", "a");
  EXPECT_TRUE(absl::IsFailedPrecondition(moved));
  EXPECT_EQ(FindReason(moved),
            (Reason{.name = "MOVED",
                    .values = {{"address", "host:5"}, {"adapter", "a"}}}));
}

TEST(ReasonTest, WithoutAnOwnerTheCallIsToBeMadeAgain) {
  const absl::Status waits = MovedTo("");
  EXPECT_TRUE(absl::IsUnavailable(waits));
  EXPECT_EQ(FindReason(waits), (Reason{.name = "STANDBY", .values = {}}));
}

}  // namespace
}  // namespace weft
