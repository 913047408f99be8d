// Tests which kernels compute a product with a weight of 8 bits, on the device
// of tests/support/host_device.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "src/ops/int8_weight.h"
#include "src/ops/matmul.h"
#include "tests/ops/quantized.h"
#include "tests/support/host_device/host_device.h"

namespace weft::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The bytes of a row are a multiple of 16 only at 512 inputs.
TEST(DeviceInt8Test, FewRowsTakeOneLaunchAndOthersTwo) {
  for (const int64_t inputs : {512, 576, 896, 360}) {
    SCOPED_TRACE(inputs);
    const at::Tensor weight =
        Int8To(QuantizedRows(at::ones({16, inputs})), at::kCUDA);
    const auto launches = [&](int64_t rows) {
      const at::Tensor x =
          at::ones({rows, inputs}, at::kBFloat16).to(at::kCUDA);
      const DeviceRecording recording;
      static_cast<void>(ops::Linear(x, weight));
      EXPECT_THAT(recording.events().waits, ::testing::IsEmpty());
      return recording.events().launches;
    };
    EXPECT_THAT(launches(64), ElementsAre(HasSubstr("Int8FewRowsKernel")));
    EXPECT_THAT(launches(65), ElementsAre(HasSubstr("WidenInt8Kernel"), "mm"));
  }
}

TEST(DeviceInt8Test, SelectedRowsTakeTwoLaunches) {
  const at::Tensor weight =
      Int8To(QuantizedRows(at::ones({16, 576})), at::kCUDA);
  const at::Tensor index = at::tensor({3L, 15L}).to(at::kCUDA);
  const DeviceRecording recording;
  static_cast<void>(ops::WidenedRows(weight, index, at::kBFloat16));
  EXPECT_THAT(recording.events().launches,
              ElementsAre("index_select", HasSubstr("WidenInt8Kernel")));
}

TEST(DeviceInt8Test, QuantisesToTheBitsOfTheCpu) {
  const at::Tensor weight = Int8To(EmptyInt8(16, 576), at::kCUDA);
  const at::Tensor rows = at::randn({16, 576});
  EXPECT_FALSE(ops::QuantizeRows(rows, weight).has_value());
  EXPECT_TRUE(at::equal(ops::Widened(weight, at::kFloat).cpu(),
                        ops::Widened(QuantizedRows(rows), at::kFloat)));
}

}  // namespace
}  // namespace weft::testing
