// Tests the copies between the host and the device.
#include "src/ops/host_copy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <span>
#include <vector>

namespace weft::ops {
namespace {

TEST(HostCopyTest, OnACpuTensorsStayWhatTheyAre) {
  const at::Tensor values = at::arange(5);
  EXPECT_TRUE(ToDevice(values, at::kCPU).is_same(values));
  at::Tensor result = values, undefined;
  ToHost({&result, &undefined});
  EXPECT_TRUE(result.is_same(values));
  EXPECT_FALSE(undefined.defined());
}

TEST(HostCopyTest, NumbersTakeTheirDtypeOrTheOneAskedFor) {
  const at::Tensor longs = ToDevice(std::vector<int64_t>{3, -1}, at::kCPU);
  EXPECT_EQ(longs.scalar_type(), at::kLong);
  EXPECT_TRUE(at::equal(longs, at::tensor({3L, -1L})));
  EXPECT_EQ(ToDevice(std::vector<float>(), at::kCPU).numel(), 0);
  const at::Tensor ints = ToDevice(std::vector<int64_t>{7}, at::kCPU, at::kInt);
  EXPECT_EQ(ints.scalar_type(), at::kInt);
  EXPECT_EQ(ints.item<int>(), 7);
  const at::Tensor floats =
      ToDevice(std::vector<double>{0.1}, at::kCPU, at::kFloat);
  EXPECT_EQ(floats.item<float>(), 0.1F);
}

TEST(HostCopyTest, BytesAreCopied) {
  std::vector<int64_t> values = {1, -2, 3};
  const at::Tensor bytes = ToDevice(std::as_bytes(std::span(values)), at::kCPU);
  values.clear();
  EXPECT_TRUE(at::equal(bytes.view(at::kLong), at::tensor({1L, -2L, 3L})));
}

TEST(HostCopyTest, GoesToADeviceAndComesBack) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Tensor values = at::randn({3, 4});
  at::Tensor there = ToDevice(values, at::Device(at::kCUDA, 0));
  at::Tensor empty = ToDevice(std::vector<int64_t>(), there.device());
  EXPECT_TRUE(there.is_cuda());
  EXPECT_TRUE(empty.is_cuda());
  // The column is a view, and its copy is contiguous.
  at::Tensor column = there.t()[1];
  ToHost({&there, &column, &empty});
  EXPECT_TRUE(at::equal(there, values));
  EXPECT_TRUE(at::equal(column, values.t()[1]));
  EXPECT_TRUE(empty.is_cpu());
}

}  // namespace
}  // namespace weft::ops
