// Tests which kernels compute a product with a weight of 8 bits, on the device
// of tests/support/host_device.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "src/ops/matmul.h"
#include "tests/ops/quantized.h"
#include "tests/support/host_device/host_device.h"

namespace weft::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(DeviceInt8Test, FewRowsTakeOneLaunchAndOthersTwo) {
  const at::Tensor weight = QuantizedRows(at::ones({16, 512})).to(at::kCUDA);
  const auto launches = [&](int64_t rows) {
    const at::Tensor x = at::ones({rows, 512}, at::kBFloat16).to(at::kCUDA);
    const DeviceRecording recording;
    static_cast<void>(ops::Linear(x, weight));
    EXPECT_THAT(recording.events().waits, ::testing::IsEmpty());
    return recording.events().launches;
  };
  EXPECT_THAT(launches(64), ElementsAre(HasSubstr("Int8FewRowsKernel")));
  EXPECT_THAT(launches(65),
              ElementsAre(HasSubstr("WidenInt8ChunksKernel"), "mm"));
}

}  // namespace
}  // namespace weft::testing
