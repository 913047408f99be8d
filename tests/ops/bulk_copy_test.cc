// Tests bulk copies. tests/model runs the CUDA tests also without a GPU, on the
// device of tests/support/host_device.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <new>

#include "src/ops/host_copy.h"

namespace weft::ops {
namespace {

// Returns bytes that differ from piece to piece, to show a misplaced piece.
at::Tensor Bytes(int64_t size) {
  return at::arange(size / 4 + 1, at::kInt).view(at::kByte).narrow(0, 0, size);
}

TEST(BulkCopyTest, OnACpuTensorsStayWhatTheyAre) {
  const at::Tensor values = at::arange(5);
  EXPECT_TRUE(BulkCopyTo(values, at::kCPU).is_same(values));
}

TEST(BulkCopyTest, CopiesFromPlaceToPlaceOfTheHost) {
  const at::Tensor from = at::randn({3, 4}), to = at::zeros({3, 4});
  BulkCopy(from, to);
  EXPECT_TRUE(at::equal(from, to));
}

TEST(BulkCopyTest, RefusesTensorsOfTwoKinds) {
  const at::Tensor x = at::zeros({3, 4});
  EXPECT_THROW(BulkCopy(x.t(), at::zeros({4, 3})), c10::Error);
  EXPECT_THROW(BulkCopy(at::zeros({4, 3}), x.t()), c10::Error);
  EXPECT_THROW(BulkCopy(x, at::zeros({4, 3})), c10::Error);
  EXPECT_THROW(BulkCopy(x, at::zeros({3, 4}, at::kInt)), c10::Error);
}

class BulkCopyCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }

  const at::Device device_{at::kCUDA, 0};
};

TEST_F(BulkCopyCudaTest, BytesGoToADeviceAndComeBack) {
  for (const int64_t size :
       {int64_t{0}, int64_t{1}, kBulkPieceBytes - 1, kBulkPieceBytes,
        kBulkPieceBytes + 1, kBulkPieceBytes * 5 / 2}) {
    const at::Tensor bytes = Bytes(size);
    const at::Tensor there = BulkCopyTo(bytes, device_);
    EXPECT_TRUE(there.is_cuda());
    EXPECT_TRUE(there.is_same(BulkCopyTo(there, device_)));
    EXPECT_TRUE(at::equal(there, bytes.to(device_))) << size;
    const at::Tensor back = BulkCopyTo(there, at::kCPU);
    EXPECT_TRUE(back.is_cpu());
    EXPECT_FALSE(back.is_pinned());
    EXPECT_TRUE(at::equal(back, bytes)) << size;
  }
}

TEST_F(BulkCopyCudaTest, ADownloadHasTheWorkQueuedBeforeIt) {
  at::Tensor there = at::zeros({kBulkPieceBytes}, device_);  // Four pieces.
  there.add_(3);
  const at::Tensor here = BulkCopyTo(there, at::kCPU);
  there.zero_();
  EXPECT_TRUE(at::equal(here, at::full({kBulkPieceBytes}, 3.0F)));
}

TEST_F(BulkCopyCudaTest, AnUploadHasReadTheHostWhenItReturns) {
  at::Tensor here = Bytes(kBulkPieceBytes * 5 / 2).clone();
  const at::Tensor there =
      at::empty(here.sizes(), here.options().device(device_));
  BulkCopy(here, there);
  here.zero_();
  EXPECT_TRUE(at::equal(BulkCopyTo(there, at::kCPU), Bytes(here.numel())));
}

TEST_F(BulkCopyCudaTest, NoHostMemoryIsABadAlloc) {
  // `huge` has 2^50 elements, but memory for only one.
  const at::Tensor one = at::zeros({1}, device_);
  const at::Tensor huge =
      at::for_blob(one.mutable_data_ptr(), {int64_t{1} << 50})
          .options(one.options())
          .target_device(device_)
          .make_tensor();
  EXPECT_THROW(static_cast<void>(BulkCopyTo(huge, at::kCPU)), std::bad_alloc);
}

}  // namespace
}  // namespace weft::ops
