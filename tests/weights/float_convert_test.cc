#include "src/weights/float_convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace weft::weights {
namespace {

using ::testing::ElementsAre;

TEST(F16ToFloat, IsExactAtTheEdgesOfTheFormat) {
  EXPECT_EQ(F16ToFloat(0x3c00), 1.0f);
  EXPECT_EQ(F16ToFloat(0xc000), -2.0f);
  EXPECT_EQ(F16ToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(F16ToFloat(0x0400), 0x1p-14f);
  EXPECT_EQ(F16ToFloat(0x0001), 0x1p-24f);
  EXPECT_EQ(F16ToFloat(0x83ff), -0x1.ff8p-15f);
  EXPECT_TRUE(std::signbit(F16ToFloat(0x8000)));
  EXPECT_EQ(F16ToFloat(0xfc00), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(F16ToFloat(0x7e00)));
}

TEST(F16ToFloat, GrowsWithItsBits) {
  for (uint16_t bits = 0; bits < 0x7c00; ++bits) {
    ASSERT_LT(F16ToFloat(bits), F16ToFloat(static_cast<uint16_t>(bits + 1)));
  }
}

TEST(Bf16ToFloat, IsTheUpperHalf) {
  EXPECT_EQ(Bf16ToFloat(0x3f80), 1.0f);
  EXPECT_EQ(Bf16ToFloat(0xc040), -3.0f);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(0x7fc0)));
}

TEST(CopyToFloats, ReadsUnalignedBytes) {
  const std::vector<uint8_t> bytes = {0xee, 0x00, 0x3c, 0x00, 0xc0};
  const TensorView view = {
      .dtype = ScalarType::kF16,
      .shape = {2},
      .bytes = absl::MakeConstSpan(
          reinterpret_cast<const std::byte*>(bytes.data()) + 1, 4)};
  std::vector<float> values(2);
  ASSERT_TRUE(CopyToFloats(view, absl::MakeSpan(values)).ok());
  EXPECT_THAT(values, ElementsAre(1.0f, -2.0f));
}

TEST(CopyToFloats, RefusesIntegers) {
  const TensorView view = {
      .dtype = ScalarType::kI32, .shape = {0}, .bytes = {}};
  EXPECT_EQ(CopyToFloats(view, {}).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace weft::weights
