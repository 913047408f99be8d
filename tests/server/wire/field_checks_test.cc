#include "server/wire/field_checks.h"

#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace weft::server {
namespace {

TEST(FieldChecksTest, IntervalsHonourTheirEnds) {
  const Interval half_open = {.low = 0, .high = 1, .high_open = true};
  EXPECT_TRUE(half_open.Contains(0));
  EXPECT_FALSE(half_open.Contains(1));
  EXPECT_FALSE(half_open.Contains(-1e-9));
  EXPECT_EQ(half_open.ToString(), "[0, 1)");
  const Interval open_low = {.low = 0, .high = 1, .low_open = true};
  EXPECT_FALSE(open_low.Contains(0));
  EXPECT_TRUE(open_low.Contains(1));
  EXPECT_FALSE(open_low.Contains(std::numeric_limits<double>::quiet_NaN()));
}

TEST(FieldChecksTest, QuotedCutsAndEscapes) {
  EXPECT_EQ(Quoted("a\nb"), "\"a\\nb\"");
  EXPECT_EQ(Quoted(std::string(100, 'x')),
            "\"" + std::string(48, 'x') + "...\"");
}

TEST(FieldChecksTest, FindsTheFirstBadValue) {
  EXPECT_EQ(FindBadId({}, 10), -1);
  EXPECT_EQ(FindBadId({0, 9}, 10), -1);
  EXPECT_EQ(FindBadId({0, 10, 11}, 10), 1);
  EXPECT_EQ(FindBadId({-1}, 10), 0);
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(FindNonFinite({1, 2, 3}), -1);
  EXPECT_EQ(FindNonFinite({1, -inf, inf}), 1);
  EXPECT_EQ(FindNonFinite({std::numeric_limits<float>::quiet_NaN()}), 0);
  EXPECT_EQ(FindNonFinite({std::numeric_limits<float>::max(),
                           std::numeric_limits<float>::denorm_min()}),
            -1);
  EXPECT_EQ(FindPositive({0, -0.0F, -1}), -1);
  EXPECT_EQ(FindPositive({0, 1e-9F}), 1);
}

}  // namespace
}  // namespace weft::server
