// Compares the gated delta rule on CUDA with that on the CPU in f64, which
// other tests compare with autograd. Also runs on the device of
// tests/support/host_device (tests/model).
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "src/ops/gated_delta.h"
#include "tests/support/dtype_name.h"
#include "tests/support/tolerance.h"

namespace weft::ops::cuda_gated_delta_test {
namespace {

// A prompt with two completions, of which one has two of its own, and a
// sequence by itself.
const std::vector<AttentionNode> kNodes = {{0, 66, -1, 77}, {66, 70, 0, 74},
                                           {70, 73, 1, 73}, {73, 74, 1, 74},
                                           {74, 77, 0, 77}, {77, 80, -1, 80}};
constexpr int64_t kRows = 80;

DeltaParameters MakeParameters(int64_t features) {
  DeltaParameters p{.num_key_heads = 1,
                    .num_value_heads = 2,
                    .key_features = features,
                    .value_features = features};
  p.conv_WR1 = at::randn({4 * features, 4}, at::kDouble) / 2;
  p.conv_bias_W = at::randn({4 * features}, at::kDouble) / 4;
  p.a_log_H = at::rand({2}, at::kDouble);
  p.dt_bias_H = at::randn({2}, at::kDouble);
  return p;
}

DeltaInputs Split(const at::Tensor& fused, const DeltaParameters& p) {
  const int64_t width = p.conv_WR1.size(0);
  return {fused.narrow(1, 0, width), fused.narrow(1, width, 2),
          fused.narrow(1, width + 2, 2)};
}

// All numbers of a pass.
struct Results {
  at::Tensor out, gradient, prefilled, stepped, conv, state, normed, dnormed;
};

Results RunAll(const at::Tensor& fused, const at::Tensor& dout,
               const DeltaParameters& p, const DeltaStates& states) {
  const c10::InferenceMode no_grad;
  Results r;
  DeltaTape tape;
  const DeltaTrees trees(kNodes);
  r.out = GatedDelta(Split(fused, p), p, trees, &tape);
  r.gradient = at::empty_like(fused);
  GatedDeltaBackward(dout, Split(fused, p), p, trees, tape,
                     Split(r.gradient, p));
  r.prefilled = GatedDeltaPrefill(
      Split(fused, p), p,
      DeltaTrees({{0, 70, -1, 70}, {70, kRows, -1, kRows}}, states.slots_Q),
      states);
  r.stepped = GatedDeltaStep(Split(fused.narrow(0, 3, 2), p), p, states);
  r.conv = states.conv_NRW;
  r.state = states.state_NHKV;
  const at::Tensor weight = fused[0].narrow(0, 0, p.value_features);
  r.normed = GatedRmsNorm(r.out, dout, weight, 1e-6);
  const at::Tensor dz = at::empty_like(dout);
  r.dnormed = at::empty_like(dout);
  GatedRmsNormBackward(dout, r.out, dout, weight, 1e-6, r.dnormed, dz);
  r.dnormed = r.dnormed + dz;
  return r;
}

class CudaGatedDeltaOpTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
    at::manual_seed(5);
  }

  static at::Tensor OnDevice(const at::Tensor& x) {
    return x.to(at::TensorOptions(at::kCUDA).dtype(GetParam()));
  }
  static at::Tensor Random(at::IntArrayRef sizes) {
    return at::randn(sizes, at::kDouble).to(GetParam()).to(at::kDouble);
  }
  static void ExpectClose(const at::Tensor& actual, const at::Tensor& expected,
                          double error, const char* name) {
    const at::Tensor got = actual.cpu().to(at::kDouble);
    EXPECT_LE((got - expected).norm().item<double>(),
              error * expected.norm().item<double>())
        << name;
  }

  static void Check(int64_t features, double error) {
    const DeltaParameters p = MakeParameters(features);
    DeltaParameters on_device = p;
    on_device.conv_WR1 = p.conv_WR1.to(at::kFloat).to(at::kCUDA);
    on_device.conv_bias_W = p.conv_bias_W.to(at::kFloat).to(at::kCUDA);
    on_device.a_log_H = p.a_log_H.to(at::kFloat).to(at::kCUDA);
    on_device.dt_bias_H = p.dt_bias_H.to(at::kFloat).to(at::kCUDA);
    const at::Tensor fused = Random({kRows, 4 * features + 5});
    const at::Tensor dout = Random({kRows, 2, features});
    const DeltaStates states = {
        Random({4, 3, 4 * features}),
        at::randn({4, 2, features, features}, at::kDouble),
        at::tensor({2, 0}, at::kLong)};
    const DeltaStates device_states = {
        OnDevice(states.conv_NRW),
        states.state_NHKV.to(at::kFloat).to(at::kCUDA),
        states.slots_Q.to(at::kCUDA)};
    const Results got =
        RunAll(OnDevice(fused), OnDevice(dout), on_device, device_states);
    const Results want = RunAll(fused, dout, p, states);
    ExpectClose(got.out, want.out, error, "out");
    const DeltaInputs d = Split(got.gradient, p);
    const DeltaInputs want_d = Split(want.gradient, p);
    ExpectClose(d.qkv_TW, want_d.qkv_TW, 2 * error, "dqkv");
    ExpectClose(d.beta_TH, want_d.beta_TH, 2 * error, "dbeta");
    ExpectClose(d.alpha_TH, want_d.alpha_TH, 2 * error, "dalpha");
    ExpectClose(got.prefilled, want.prefilled, error, "prefilled");
    ExpectClose(got.stepped, want.stepped, error, "stepped");
    ExpectClose(got.conv, want.conv, 0, "conv");
    ExpectClose(got.state, want.state, error, "state");
    ExpectClose(got.normed, want.normed, 2 * error, "normed");
    ExpectClose(got.dnormed, want.dnormed, 4 * error, "dnormed");
  }
};

// Sums of a few hundred terms in f32, of numbers that are stored in the dtype.
TEST_P(CudaGatedDeltaOpTest, IsThatOfTheCpu) {
  Check(16,
        8 * 20 * kEpsilonF32 + (GetParam() == at::kFloat ? 0 : kEpsilonBf16));
}

// Four products in a row on tensor cores, which round two operands each to half
// an epsilon of bf16, independently.
TEST_P(CudaGatedDeltaOpTest, IsThatOfTheCpuOnTensorCores) {
  Check(128, GetParam() == at::kFloat ? 8 * 20 * kEpsilonF32
                                      : kEpsilonBf16 / 2 * std::sqrt(8));
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaGatedDeltaOpTest,
                         ::testing::Values(at::kFloat, at::kBFloat16),
                         weft::testing::DtypeName);

}  // namespace
}  // namespace weft::ops::cuda_gated_delta_test
