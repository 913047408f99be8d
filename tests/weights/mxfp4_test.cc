#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "src/weights/float_convert.h"
#include "tests/support/status_matchers.h"

namespace weft::weights {
namespace {

// Returns a value of the format's table. `bits` is a sign bit, two exponent
// bits and one mantissa bit.
float ValueOf(unsigned bits) {
  const unsigned exponent = (bits >> 1) & 3;
  const float mantissa = static_cast<float>(bits & 1) / 2;
  const float size =
      exponent == 0 ? mantissa
                    : std::ldexp(1 + mantissa, static_cast<int>(exponent) - 1);
  return bits >= 8 ? -size : size;
}

TEST(WidenMxfp4, FollowsTheFormat) {
  std::vector<std::byte> blocks;
  for (unsigned i = 0; i < 32; ++i) {
    blocks.push_back(static_cast<std::byte>(i * 37 % 256));
  }
  for (const int exponent : {0, 100, 127, 150, 254}) {
    const std::vector<std::byte> scales = {static_cast<std::byte>(exponent),
                                           std::byte{127}};
    std::vector<float> values(64);
    ASSERT_THAT(WidenMxfp4(blocks, scales, absl::MakeSpan(values)), IsOk());
    for (size_t i = 0; i < values.size(); ++i) {
      const auto pair = std::to_integer<unsigned>(blocks[i / 2]);
      const float value = ValueOf(i % 2 == 0 ? pair & 15 : pair >> 4);
      EXPECT_EQ(values[i], std::ldexp(value, i < 32 ? exponent - 127 : 0)) << i;
    }
  }
}

TEST(WidenMxfp4, RefusesNanByItsBlock) {
  std::vector<float> values(64);
  EXPECT_THAT(WidenMxfp4(std::vector<std::byte>(32),
                         std::vector<std::byte>{std::byte{1}, std::byte{255}},
                         absl::MakeSpan(values)),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "MXFP4 block 1 has scale 255"));
}

}  // namespace
}  // namespace weft::weights
