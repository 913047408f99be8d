// Tests which kernels compute the gated delta rule, and that no pass over
// chunks waits, on the device of tests/support/host_device.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "src/ops/gated_delta.h"
#include "tests/support/cuda_on_host/cuda_runtime_api.h"
#include "tests/support/host_device/host_device.h"

namespace weft::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// One key head of 128 features, and one value head of 64.
constexpr int64_t kKeys = 128, kValues = 64, kWidth = 2 * kKeys + kValues;
constexpr int64_t kRows = 70;
// 99 KiB, as in the compute capabilities 8.6, 8.9 and 12.0.
constexpr int kFewSharedBytes = 99 * 1024;

at::Tensor OnDevice(const at::Tensor& x) { return x.to(at::kCUDA); }

ops::DeltaInputs Split(const at::Tensor& fused) {
  return {fused.narrow(1, 0, kWidth), fused.narrow(1, kWidth, 1),
          fused.narrow(1, kWidth + 1, 1)};
}

class DeviceDeltaTest : public ::testing::Test {
 protected:
  struct Results {
    at::Tensor out, gradient, prefilled, states;
  };

  DeviceDeltaTest() {
    at::manual_seed(7);
    p_ = {.conv_WR1 = OnDevice(at::randn({kWidth, 4}) / 2),
          .a_log_H = OnDevice(at::zeros({1})),
          .dt_bias_H = OnDevice(at::ones({1})),
          .num_key_heads = 1,
          .num_value_heads = 1,
          .key_features = kKeys,
          .value_features = kValues};
  }
  ~DeviceDeltaTest() override {
    cuda_on_host::max_shared_bytes = cuda_on_host::kSharedBytesOfHopper;
  }

  // Runs all passes over chunks, and records their launches.
  Results RunAll(int max_shared_bytes, std::vector<std::string>& launches) {
    cuda_on_host::max_shared_bytes = max_shared_bytes;
    at::manual_seed(8);
    const at::Tensor fused =
        OnDevice(at::randn({kRows, kWidth + 2}).to(at::kBFloat16));
    const at::Tensor dout =
        OnDevice(at::randn({kRows, 1, kValues}).to(at::kBFloat16));
    const ops::DeltaStates states = {
        OnDevice(at::randn({4, 3, kWidth}).to(at::kBFloat16)),
        OnDevice(at::randn({4, 1, kKeys, kValues})),
        OnDevice(at::tensor({3, 1}, at::kLong))};
    Results r{.gradient = at::empty_like(fused), .states = states.state_NHKV};
    const ops::DeltaTrees trees(kSequences);
    const DeviceRecording recording;
    ops::DeltaTape tape;
    r.out = ops::GatedDelta(Split(fused), p_, trees, &tape);
    ops::GatedDeltaBackward(dout, Split(fused), p_, trees, tape,
                            Split(r.gradient));
    r.prefilled = ops::GatedDeltaPrefill(
        Split(fused), p_, ops::DeltaTrees(kSequences, states.slots_Q), states);
    EXPECT_THAT(recording.events().waits, IsEmpty());
    launches = recording.events().launches;
    return r;
  }

  const std::vector<ops::AttentionNode> kSequences = {{0, 68, -1, 68},
                                                      {68, kRows, -1, kRows}};
  ops::DeltaParameters p_;
};

TEST_F(DeviceDeltaTest, EveryDeviceWithTensorCoresForBf16TakesTheKernels) {
  const c10::InferenceMode no_grad;
  std::vector<std::string> launches;
  const Results want = RunAll(cuda_on_host::kSharedBytesOfHopper, launches);
  for (const char* kernel :
       {"DeltaScoresKernel", "DeltaChunkKernel", "DeltaStatesBackwardKernel",
        "DeltaRowsBackwardKernel"}) {
    EXPECT_THAT(launches, Contains(HasSubstr(kernel)));
  }
  std::vector<std::string> same_launches;
  const Results got = RunAll(kFewSharedBytes, same_launches);
  EXPECT_EQ(same_launches, launches);
  EXPECT_TRUE(got.out.cpu().equal(want.out.cpu()));
  EXPECT_TRUE(got.gradient.cpu().equal(want.gradient.cpu()));
  EXPECT_TRUE(got.prefilled.cpu().equal(want.prefilled.cpu()));
  EXPECT_TRUE(got.states.cpu().equal(want.states.cpu()));
}

}  // namespace
}  // namespace weft::testing
