#include "src/lora/adapter.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

namespace weft::lora::adapter_test {
namespace {

using ::testing::Each;

constexpr model_config::ModelShape kShape = {.num_layers = 2,
                                             .hidden = 6,
                                             .q_width = 8,
                                             .kv_width = 4,
                                             .ffn = 10,
                                             .vocab = 12};

LoraConfig Config() { return {.rank = 2, .alpha = 6, .seed = 5}; }

Adapter MakeAdapter(at::ScalarType dtype = at::kFloat) {
  return {Config(), kShape, dtype, at::kCPU};
}

std::vector<float> Host(const at::Tensor& tensor) {
  const float* data = tensor.const_data_ptr<float>();
  return {data, data + tensor.numel()};
}

// Returns distinct values that are exact in f32.
std::vector<float> Ramp(int64_t size, float start) {
  std::vector<float> values(size);
  for (int64_t i = 0; i < size; ++i) {
    values[i] = start + static_cast<float>(i);
  }
  return values;
}

AdapterState RampState(int64_t size) {
  return {.weights = Ramp(size, 1),
          .gradient = Ramp(size, 1000),
          .moment1 = Ramp(size, 2000),
          .moment2 = Ramp(size, 3000),
          .optim_steps = 17,
          .optimizer = Optimizer::kMuon,
          .accumulated_tokens = 11};
}

// Version numbers count within one adapter, so another adapter has the same
// numbers. Ids are unique.
TEST(WeightsIdTest, EverySetOfWeightsHasItsOwn) {
  Adapter adapter = MakeAdapter();
  std::set<uint64_t> ids = {adapter.latest()->id.value()};
  adapter.FinishStep(adapter.NextWeights());
  ids.insert(adapter.latest()->id.value());
  adapter.SetState(adapter.GetState());
  ids.insert(adapter.latest()->id.value());
  ids.insert(AdapterVersion(*adapter.latest()).id.value());
  const Adapter again = MakeAdapter();
  EXPECT_EQ(again.latest()->number, 1u);
  ids.insert(again.latest()->id.value());
  EXPECT_EQ(ids.size(), 5u);
  EXPECT_FALSE(ids.contains(0));  // 0 is the base model.
}

TEST(AdapterTest, StartsWithInitialWeightsAndNothingElse) {
  const Adapter adapter = MakeAdapter();
  const AdapterState state = adapter.GetState();
  EXPECT_EQ(state.weights, InitialWeights(adapter.layout(), 5));
  EXPECT_THAT(state.gradient, Each(0.0f));
  EXPECT_THAT(state.moment1, Each(0.0f));
  EXPECT_THAT(state.moment2, Each(0.0f));
  EXPECT_EQ(state.optim_steps, 0u);
  EXPECT_EQ(state.accumulated_tokens, 0U);
  EXPECT_EQ(adapter.latest()->number, 1u);
  EXPECT_EQ(adapter.layout().factors()[0].scale, 3.0);
  EXPECT_EQ(adapter.latest()->HostWeights(), state.weights);
}

TEST(AdapterTest, ComputesInF32WithTheMasterCopyItself) {
  const Adapter adapter = MakeAdapter(at::kFloat);
  EXPECT_EQ(adapter.latest()->compute_N.const_data_ptr(),
            adapter.latest()->weights_N.const_data_ptr());
}

TEST(AdapterTest, ComputesInBf16WithARoundedCopyOfEveryVersion) {
  Adapter adapter = MakeAdapter(at::kBFloat16);
  const int64_t size = adapter.layout().num_parameters();
  adapter.SetState({.weights = Ramp(size, 0.3F)});
  const AdapterVersionPtr& latest = adapter.latest();
  EXPECT_EQ(latest->compute_N.scalar_type(), at::kBFloat16);
  EXPECT_EQ(latest->weights_N.scalar_type(), at::kFloat);
  EXPECT_TRUE(
      at::equal(latest->compute_N, latest->weights_N.to(at::kBFloat16)));
}

TEST(AdapterTest, ResidentBytesCountEveryBuffer) {
  const Adapter f32 = MakeAdapter(at::kFloat);
  const Adapter bf16 = MakeAdapter(at::kBFloat16);
  const auto size = static_cast<uint64_t>(f32.layout().num_parameters());
  // Counts weights, gradient, scratch and two moments.
  EXPECT_EQ(f32.resident_bytes(), 5 * 4 * size);
  EXPECT_EQ(bf16.resident_bytes(), (5 * 4 + 2) * size);
}

TEST(AdapterTest, ViewsShowTheLayoutsPlaces) {
  Adapter adapter = MakeAdapter();
  const AdapterLayout& layout = adapter.layout();
  adapter.SetState({.weights = Ramp(layout.num_parameters(), 0)});
  const AdapterVersion& version = *adapter.latest();
  const GroupLayout& qkv = layout.group(1, ProjectionGroup::kQkv);
  const at::Tensor a = version.StackedA(version.weights_N, qkv);
  ASSERT_EQ(a.sizes(), (std::vector<int64_t>{3 * 2, kShape.hidden}));
  for (int64_t f = 0; f < 3; ++f) {
    const LoraFactor& factor = qkv.factors[f];
    // Checks row 1, column 2 of this factor's A, and row 3, column 1 of its B.
    EXPECT_EQ(a[f * 2 + 1][2].item<float>(),
              static_cast<float>(factor.a_offset + kShape.hidden + 2));
    const at::Tensor b = version.B(version.weights_N, factor);
    ASSERT_EQ(b.sizes(), (std::vector<int64_t>{factor.out, 2}));
    EXPECT_EQ(b[3][1].item<float>(),
              static_cast<float>(factor.b_offset + 3 * 2 + 1));
  }
}

TEST(AdapterTest, ScratchReachesTheGradientOnlyWhenCommitted) {
  Adapter adapter = MakeAdapter();
  adapter.scratch().add_(2);
  EXPECT_THAT(adapter.GetState().gradient, Each(0.0f));
  adapter.ClearScratch();
  adapter.scratch().add_(3);
  adapter.CommitScratch(7);
  EXPECT_THAT(adapter.GetState().gradient, Each(3.0f));
}

TEST(AdapterTest, CommittedRequestsAddUp) {
  Adapter adapter = MakeAdapter();
  for (const float value : {1.0F, 4.0F}) {
    adapter.ClearScratch();
    adapter.scratch().add_(value);
    adapter.CommitScratch(7);
  }
  EXPECT_THAT(adapter.GetState().gradient, Each(5.0f));
  EXPECT_EQ(adapter.accumulated_tokens(), 14U);
  adapter.ClearGradient();
  EXPECT_THAT(adapter.GetState().gradient, Each(0.0f));
  EXPECT_EQ(adapter.accumulated_tokens(), 0U);
}

TEST(AdapterTest, AStepReusesABufferThatNobodyPinned) {
  Adapter adapter = MakeAdapter();
  const void* before = adapter.latest()->weights_N.data_ptr();
  at::Tensor next = adapter.NextWeights();
  EXPECT_EQ(next.data_ptr(), before);
  next.fill_(2);
  adapter.FinishStep(next);
  EXPECT_EQ(adapter.latest()->weights_N.data_ptr(), before);
  EXPECT_THAT(adapter.latest()->HostWeights(), Each(2.0f));
}

TEST(AdapterTest, AStepNeverChangesAPinnedVersion) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Adapter adapter = MakeAdapter(dtype);
    const AdapterVersionPtr pinned = adapter.latest();
    const std::vector<float> weights = pinned->HostWeights();
    const at::Tensor compute = pinned->compute_N.clone();
    for (int step = 0; step < 2; ++step) {
      at::Tensor next = adapter.NextWeights();
      next.fill_(step);
      adapter.FinishStep(next);
    }
    EXPECT_EQ(pinned->HostWeights(), weights);
    EXPECT_TRUE(at::equal(pinned->compute_N, compute));
    EXPECT_EQ(pinned->number, 1u);
    EXPECT_EQ(adapter.latest()->number, 3u);
  }
}

TEST(AdapterTest, AStepPublishesCountsAndClearsTheGradient) {
  Adapter adapter = MakeAdapter(at::kBFloat16);
  adapter.scratch().fill_(1);
  adapter.CommitScratch(7);
  adapter.moment1().fill_(4);
  at::Tensor next = adapter.NextWeights();
  next.fill_(0.7);
  adapter.FinishStep(next);
  EXPECT_EQ(adapter.optim_steps(), 1u);
  EXPECT_EQ(adapter.accumulated_tokens(), 0U);
  EXPECT_EQ(adapter.latest()->number, 2u);
  EXPECT_THAT(Host(adapter.gradient()), Each(0.0f));
  EXPECT_THAT(Host(adapter.moment1()), Each(4.0f));
  EXPECT_THAT(Host(adapter.latest()->compute_N.to(at::kFloat)),
              Each(static_cast<float>(at::BFloat16(0.7F))));
}

TEST(AdapterTest, StateComesBackAsItWas) {
  Adapter adapter = MakeAdapter(at::kBFloat16);
  const AdapterState state = RampState(adapter.layout().num_parameters());
  adapter.SetState(state);
  const AdapterState read = adapter.GetState();
  EXPECT_EQ(read.weights, state.weights);
  EXPECT_EQ(read.gradient, state.gradient);
  EXPECT_EQ(read.moment1, state.moment1);
  EXPECT_EQ(read.moment2, state.moment2);
  EXPECT_EQ(read.optim_steps, 17u);
  EXPECT_EQ(read.optimizer, Optimizer::kMuon);
  EXPECT_EQ(read.accumulated_tokens, 11U);
}

TEST(AdapterTest, StateWithWeightsAloneClearsTheRest) {
  Adapter adapter = MakeAdapter();
  const int64_t size = adapter.layout().num_parameters();
  adapter.SetState(RampState(size));
  adapter.SetState({.weights = Ramp(size, 9)});
  const AdapterState state = adapter.GetState();
  EXPECT_EQ(state.weights, Ramp(size, 9));
  EXPECT_THAT(state.gradient, Each(0.0f));
  EXPECT_THAT(state.moment1, Each(0.0f));
  EXPECT_THAT(state.moment2, Each(0.0f));
  EXPECT_EQ(state.optim_steps, 0u);
}

TEST(AdapterTest, LoadedStateIsANewVersionBesideAPinnedOne) {
  Adapter adapter = MakeAdapter();
  const AdapterVersionPtr pinned = adapter.latest();
  const std::vector<float> weights = pinned->HostWeights();
  AdapterState state = RampState(adapter.layout().num_parameters());
  adapter.SetState(state);
  // The caller's vectors may change or be destroyed, because the adapter holds
  // copies.
  state.weights.assign(state.weights.size(), -1);
  EXPECT_EQ(adapter.latest()->number, 2u);
  EXPECT_EQ(adapter.latest()->HostWeights(),
            Ramp(adapter.layout().num_parameters(), 1));
  EXPECT_EQ(pinned->HostWeights(), weights);
}

void ExpectGoesOnFromItsImage(at::ScalarType dtype, at::Device device) {
  Adapter stayed(Config(), kShape, dtype, device);
  stayed.SetState(RampState(stayed.layout().num_parameters()));
  AdapterImage image = stayed.ToImage();
  uint64_t bytes = 0;
  for (const at::Tensor* tensor : image.Tensors()) {
    EXPECT_TRUE(tensor->is_cpu());
    bytes += tensor->nbytes();
  }
  EXPECT_EQ(bytes, 16 * stayed.layout().num_parameters());
  EXPECT_EQ(bytes, AdapterImage::NumBytes(stayed.layout().num_parameters(),
                                          image.versions.size()));
  // Gives the image its own tensors, as if it had been read from a file.
  for (at::Tensor* tensor : image.Tensors()) *tensor = tensor->clone();
  image.versions.front().alive.reset();
  const Adapter back(Config(), stayed.shared_layout(), image, dtype, device);
  EXPECT_EQ(back.latest()->number, 2u);
  EXPECT_EQ(back.latest()->weights_N.device(), device);
  EXPECT_EQ(back.latest()->compute_N.scalar_type(), dtype);
  EXPECT_TRUE(at::equal(back.latest()->compute_N, stayed.latest()->compute_N));
  const AdapterState expected = RampState(stayed.layout().num_parameters());
  const AdapterState actual = back.GetState();
  EXPECT_EQ(actual.weights, expected.weights);
  EXPECT_EQ(actual.gradient, expected.gradient);
  EXPECT_EQ(actual.moment1, expected.moment1);
  EXPECT_EQ(actual.moment2, expected.moment2);
  EXPECT_EQ(actual.optim_steps, 17u);
  EXPECT_EQ(actual.optimizer, Optimizer::kMuon);
  EXPECT_EQ(actual.accumulated_tokens, 11U);
  EXPECT_EQ(back.resident_bytes(), stayed.resident_bytes());
}

TEST(AdapterTest, GoesOnFromItsImageAsIfItHadStayed) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    ExpectGoesOnFromItsImage(dtype, at::kCPU);
  }
}

// tests/model also runs this test, on the device of tests/support/host_device.
TEST(AdapterCudaTest, GoesOnFromItsImageAsIfItHadStayed) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    ExpectGoesOnFromItsImage(dtype, at::Device(at::kCUDA, 0));
  }
}

TEST(AdapterTest, AVersionThatIsStillPinnedComesBackAsItself) {
  auto adapter = std::make_unique<Adapter>(MakeAdapter());
  AdapterVersionPtr pinned = adapter->latest();
  const std::shared_ptr<const AdapterLayout> layout = adapter->shared_layout();
  const VersionImage image = ImageOf(pinned);
  adapter.reset();
  EXPECT_EQ(RestoreVersion(image, layout, at::kFloat, at::kCPU), pinned);
  const std::vector<float> weights = pinned->HostWeights();
  pinned.reset();
  EXPECT_TRUE(image.alive.expired());
  const AdapterVersionPtr made =
      RestoreVersion(image, layout, at::kFloat, at::kCPU);
  EXPECT_EQ(made->number, 1u);
  EXPECT_EQ(made->HostWeights(), weights);
}

}  // namespace
}  // namespace weft::lora::adapter_test
