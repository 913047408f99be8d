#include "src/engine/device/compute_device.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "src/engine/device/compute_guard.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

TEST(ComputeDeviceTest, TheHostHasNoMemoryOfItsOwnAndIsNeverLost) {
  const std::unique_ptr<ComputeDevice> host = MakeComputeDevice(at::kCPU);
  EXPECT_EQ(host->Memory().total, 0);
  host->ReleaseCached();
  EXPECT_THAT(host->CheckAnswers(), IsOk());
}

TEST(RunGuardedTest, MemoryThatLibrariesLackIsMemoryToo) {
  const auto run = [](int code) {
    return RunGuarded("a product", [code] {
      throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code,
                                  "from CUDA");
    });
  };
  EXPECT_THAT(run(2), IsStatus(absl::StatusCode::kResourceExhausted,
                               "a product: out of device memory"));
  EXPECT_THAT(run(700),
              IsStatus(absl::StatusCode::kInternal, "a product: from CUDA"));
}

class CudaDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
    cuda_ = MakeComputeDevice(at::Device(at::kCUDA, 0));
  }

  static at::Tensor Allocate(int64_t bytes) {
    return at::empty({bytes}, at::TensorOptions(at::kByte).device(at::kCUDA));
  }

  std::unique_ptr<ComputeDevice> cuda_;
};

TEST_F(CudaDeviceTest, AllocationsBeyondTheShareFailAndMemoryComesBack) {
  constexpr double kShare = 0.1;
  const int64_t left = cuda_->LimitTo(kShare);
  ASSERT_GT(left, 0);
  EXPECT_LE(left, kShare * static_cast<double>(cuda_->Memory().total));
  {
    const at::Tensor half = Allocate(left / 2);
    EXPECT_GE(cuda_->Memory().allocated, left / 2);
    EXPECT_THROW(Allocate(left), c10::OutOfMemoryError);
  }
  EXPECT_GE(cuda_->Memory().reserved, left / 2);
  cuda_->ReleaseCached();
  EXPECT_LT(cuda_->Memory().reserved, left / 2);
  EXPECT_THAT(cuda_->CheckAnswers(), IsOk());
  EXPECT_GE(cuda_->LimitTo(1), left);
}

// Runs in a process of its own, because that process can compute nothing more
// afterwards.
void LoseTheDevice() {
  const std::unique_ptr<ComputeDevice> cuda =
      MakeComputeDevice(at::Device(at::kCUDA, 0));
  const at::Tensor x = at::zeros({4}, at::TensorOptions().device(at::kCUDA));
  // The index is out of range but fits in 32 bits. LibTorch may read only 32
  // bits of an index, so a larger index could wrap into the range of x.
  const at::Tensor beyond =
      at::full({1}, int64_t{1} << 20, x.options().dtype(at::kLong));
  const absl::Status before = cuda->CheckAnswers();
  const absl::Status launched = RunGuarded("a device-side assertion", [&] {
    static_cast<void>(at::index_select(x, 0, beyond).sum().item<float>());
  });
  cuda->ReleaseCached();
  const absl::Status after = cuda->CheckAnswers();
  std::fprintf(stderr, "%s; %s; %s\n", before.ToString().c_str(),
               launched.ToString().c_str(), after.ToString().c_str());
  std::_Exit(before.ok() && !launched.ok() && absl::IsUnavailable(after) ? 0
                                                                         : 1);
}

TEST_F(CudaDeviceTest, IsLostAfterAnAssertionOnTheDevice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LoseTheDevice(), ::testing::ExitedWithCode(0), "CUDA device 0");
}

}  // namespace
}  // namespace weft::engine
