// The CUDA way through the adapters' part of a linear layer against the CPU's
// in f64, which lora_linear_test.cc holds against autograd. Without CUDA its
// kernels run on the host, on the CPU's tensors.
#include "src/lora/lora_cuda.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "src/ops/cuda_dispatch.h"
#include "tests/support/tolerance.h"

namespace weft::lora {
namespace {

using ::weft::testing::kEpsilonBf16;
using ::weft::testing::Tolerance;

constexpr ModelShape kShape = {.num_layers = 1,
                               .hidden = 96,
                               .q_width = 80,
                               .kv_width = 24,
                               .ffn = 100,
                               .vocab = 56};
constexpr LoraSite kQkv = {0, ProjectionGroup::kQkv};
constexpr int64_t kRows = 400;
constexpr int64_t kOut = 80 + 2 * 24;

CUstream_st* Stream() {
  if constexpr (ops::kHasCudaKernels) return ops::cuda::CurrentStream();
  return nullptr;
}

at::Device TheDevice() { return ops::kHasCudaKernels ? at::kCUDA : at::kCPU; }

// Rounded to bf16, in f64 on the CPU.
at::Tensor Random(at::IntArrayRef sizes, double scale) {
  return (at::randn(sizes, at::kDouble) * scale)
      .to(at::kBFloat16)
      .to(at::kDouble);
}

AdapterVersionPtr MakeVersion(int rank, std::vector<TargetModule> modules) {
  auto version = std::make_shared<AdapterVersion>();
  version->layout = std::make_shared<AdapterLayout>(
      kShape,
      LoraConfig{
          .rank = rank, .alpha = 8, .target_modules = std::move(modules)});
  version->compute_N = Random({version->layout->num_parameters()}, 0.3);
  return version;
}

// Ranks 1 to 33, rows 1 to 300, rows of no segment, two segments of one
// adapter, an adapter without anything at the site.
LoraRouting MakeRouting() {
  const AdapterVersionPtr long_one = MakeVersion(33, DefaultTargetModules());
  const AdapterVersionPtr versions[] = {
      long_one, MakeVersion(1, {TargetModule::kVProj}),
      MakeVersion(7, {TargetModule::kQProj, TargetModule::kVProj}), long_one,
      MakeVersion(4, {TargetModule::kLmHead})};
  const int64_t ranges[][2] = {
      {3, 303}, {303, 304}, {310, 380}, {380, 385}, {390, 395}};
  LoraRouting routing;
  for (int i = 0; i < 5; ++i) {
    routing.push_back(
        {.begin = ranges[i][0],
         .end = ranges[i][1],
         .version = versions[i],
         .gradient_N = Random(versions[i]->compute_N.sizes(), 1)});
  }
  routing[3].gradient_N = routing[0].gradient_N;
  return routing;
}

// The same routing with copies of its tensors, where two were one too.
LoraRouting Converted(const LoraRouting& routing, at::Device device,
                      at::ScalarType weights, at::ScalarType gradients) {
  LoraRouting converted = routing;
  for (LoraSegment& segment : converted) {
    auto version = std::make_shared<AdapterVersion>(*segment.version);
    version->compute_N =
        segment.version->compute_N.to(device, weights, false, /*copy=*/true);
    segment.version = version;
    segment.gradient_N =
        segment.gradient_N.to(device, gradients, false, /*copy=*/true);
  }
  converted[3].gradient_N = converted[0].gradient_N;
  return converted;
}

void ExpectNear(const at::Tensor& actual, const at::Tensor& expected,
                const char* what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const double largest = expected.abs().max().item<double>();
  const double error =
      (actual.cpu().to(at::kDouble) - expected).abs().max().item<double>();
  // Sums are f32; what is stored on the way, or at the end, is rounded.
  EXPECT_LE(error, Tolerance(kEpsilonBf16, 1, largest)) << what;
}

class LoraCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (ops::kHasCudaKernels && !at::hasCUDA()) {
      GTEST_SKIP() << "no CUDA device";
    }
    at::manual_seed(12);
    routing_ = MakeRouting();
    x_TI_ = Random({kRows, kShape.hidden}, 1);
    y_TO_ = Random({kRows, kOut}, 1);
    dy_TO_ = Random({kRows, kOut}, 1);
  }
  static at::Tensor OnDevice(const at::Tensor& x) {
    return x.to(TheDevice(), at::kBFloat16);
  }

  LoraRouting routing_;
  at::Tensor x_TI_;
  at::Tensor y_TO_;
  at::Tensor dy_TO_;
};

TEST_F(LoraCudaTest, IsTheCpusWayForMixedRanksAndLengths) {
  // A base of zeros leaves the adapters' part.
  const BaseLinear zeros = {.weight_OI =
                                at::zeros({kOut, kShape.hidden}, at::kDouble)};
  const LoraRouting exact =
      Converted(routing_, at::kCPU, at::kDouble, at::kDouble);
  ShrunkInputs exact_shrunk;
  const at::Tensor exact_y =
      y_TO_ + LoraLinear(x_TI_, zeros, exact, kQkv, kShape, &exact_shrunk);
  const at::Tensor exact_dx =
      x_TI_ + LoraLinearBackward(dy_TO_, x_TI_, zeros, exact, kQkv, kShape,
                                 exact_shrunk, /*want_input_gradient=*/true);

  const LoraRouting routing =
      Converted(routing_, TheDevice(), at::kBFloat16, at::kFloat);
  const at::Tensor x = OnDevice(x_TI_), dy = OnDevice(dy_TO_);
  at::Tensor y = OnDevice(y_TO_), dx = OnDevice(x_TI_).clone();
  const ShrunkInputs shrunk = cuda::Shrink(x, routing, kQkv, Stream());
  cuda::Expand(shrunk, routing, kQkv, kShape, y, Stream());
  cuda::Backward(dy, x, routing, kQkv, kShape, shrunk, dx, Stream());

  for (size_t i = 0; i < routing.size(); ++i) {
    ASSERT_EQ(shrunk[i].defined(), exact_shrunk[i].defined());
    if (shrunk[i].defined()) {
      ExpectNear(shrunk[i], exact_shrunk[i], "shrunk");
    }
    ExpectNear(routing[i].gradient_N, exact[i].gradient_N, "gradient");
  }
  ExpectNear(y, exact_y, "y");
  ExpectNear(dx, exact_dx, "dx");
  // Rows of no segment keep every bit.
  EXPECT_TRUE(
      at::equal(y.slice(0, 304, 310), OnDevice(y_TO_.slice(0, 304, 310))));
  EXPECT_TRUE(at::equal(dx.slice(0, 385), OnDevice(x_TI_.slice(0, 385))));
}

TEST_F(LoraCudaTest, LeavesGradientsOutOnDemand) {
  LoraRouting routing =
      Converted(routing_, TheDevice(), at::kBFloat16, at::kFloat);
  const at::Tensor x = OnDevice(x_TI_), dy = OnDevice(dy_TO_);
  const at::Tensor trained = routing[2].gradient_N.clone();
  routing[1].gradient_N.reset();
  at::Tensor none;
  cuda::Backward(dy, x, routing, kQkv, kShape,
                 cuda::Shrink(x, routing, kQkv, Stream()), none, Stream());
  EXPECT_FALSE(none.defined());
  EXPECT_FALSE(at::equal(routing[2].gradient_N, trained));
}

TEST_F(LoraCudaTest, TakesNoSegments) {
  const at::Tensor x = OnDevice(x_TI_);
  at::Tensor y = OnDevice(y_TO_), dx;
  const LoraRouting nothing = {routing_.back()};
  for (const LoraRouting& routing : {LoraRouting(), nothing}) {
    const ShrunkInputs shrunk = cuda::Shrink(x, routing, kQkv, Stream());
    cuda::Expand(shrunk, routing, kQkv, kShape, y, Stream());
    cuda::Backward(OnDevice(dy_TO_), x, routing, kQkv, kShape, shrunk, dx,
                   Stream());
  }
  EXPECT_TRUE(at::equal(y, OnDevice(y_TO_)));
}

TEST_F(LoraCudaTest, TakesBf16OnADeviceAlone) {
  EXPECT_FALSE(cuda::TakesSegments(x_TI_, {}));
  EXPECT_FALSE(cuda::TakesSegments(x_TI_.to(at::kBFloat16), {}));
}

}  // namespace
}  // namespace weft::lora
