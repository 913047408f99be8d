#include "src/lora/adapter.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <utility>

#include "absl/types/span.h"
#include "src/base/huge_pages.h"
#include "src/ops/host_copy.h"

namespace weft::lora {
namespace {

// SplitMix64 (Steele, Lea and Flood 2014) applies this mixing function to a
// counter, so every draw can be computed on its own.
uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Returns draw `counter` from the uniform distribution on [0, 1).
double Uniform(uint64_t counter) {
  return static_cast<double>(Mix(counter) >> 11) * 0x1.0p-53;
}

// Returns draw `i` of `stream` from the distribution N(0, 1). Source: Box and
// Muller 1958.
double Normal(uint64_t stream, int64_t i) {
  const double radius = std::sqrt(-2 * std::log1p(-Uniform(stream + 2 * i)));
  return radius * std::cos(2 * std::numbers::pi * Uniform(stream + 2 * i + 1));
}

std::vector<float> ToVector(const at::Tensor& tensor_N) {
  if (tensor_N.is_cpu()) {
    const float* data = tensor_N.const_data_ptr<float>();
    return {data, data + tensor_N.numel()};
  }
  std::vector<float> values;
  values.reserve(tensor_N.numel());
  PreferHugePages(absl::MakeSpan(reinterpret_cast<std::byte*>(values.data()),
                                 tensor_N.nbytes()));
  values.resize(tensor_N.numel());
  ops::BulkCopy(tensor_N,
                at::from_blob(values.data(), tensor_N.sizes(), at::kFloat));
  return values;
}

void FromVector(const std::vector<float>& values, at::Tensor& destination_N) {
  if (values.empty()) {
    destination_N.zero_();
    return;
  }
  ops::BulkCopy(at::from_blob(const_cast<float*>(values.data()),
                              {destination_N.numel()}, at::kFloat),
                destination_N);
}

}  // namespace

std::vector<float> InitialWeights(const AdapterLayout& layout, uint64_t seed) {
  std::vector<float> weights(layout.num_parameters(), 0.0f);
  for (const LoraFactor& factor : layout.factors()) {
    const uint64_t stream =
        Mix(Mix(seed) ^ (static_cast<uint64_t>(factor.expert + 1) << 32 |
                         static_cast<uint64_t>(factor.layer) << 8 |
                         static_cast<uint64_t>(factor.module)));
    if (factor.module == TargetModule::kEmbedTokens) {
      for (int64_t i = 0; i < factor.out * factor.rank; ++i) {
        weights[factor.b_offset + i] = static_cast<float>(Normal(stream, i));
      }
      continue;
    }
    const double bound = 1.0 / std::sqrt(static_cast<double>(factor.in));
    for (int64_t i = 0; i < factor.rank * factor.in; ++i) {
      weights[factor.a_offset + i] =
          static_cast<float>((2 * Uniform(stream + i) - 1) * bound);
    }
  }
  return weights;
}

WeightsId::WeightsId() {
  static std::atomic<uint64_t> next = 1;
  value_ = next.fetch_add(1, std::memory_order_relaxed);
}

at::Tensor AdapterVersion::StackedA(const at::Tensor& flat,
                                    const GroupLayout& group) const {
  const LoraFactor& first = group.factors.front();
  return flat.narrow(0, first.a_offset, group.total_rank * first.in)
      .view({group.total_rank, first.in});
}

at::Tensor AdapterVersion::A(const at::Tensor& flat,
                             const LoraFactor& factor) const {
  return flat.narrow(0, factor.a_offset, factor.rank * factor.in)
      .view({factor.rank, factor.in});
}

at::Tensor AdapterVersion::B(const at::Tensor& flat,
                             const LoraFactor& factor) const {
  return flat.narrow(0, factor.b_offset, factor.out * factor.rank)
      .view({factor.out, factor.rank});
}

std::vector<float> AdapterVersion::HostWeights() const {
  return ToVector(weights_N);
}

VersionImage ImageOf(const AdapterVersionPtr& version) {
  return {.number = version->number,
          .weights_N = ops::BulkCopyTo(version->weights_N, at::kCPU),
          .alive = version};
}

AdapterVersionPtr RestoreVersion(
    const VersionImage& image,
    const std::shared_ptr<const AdapterLayout>& layout,
    at::ScalarType compute_dtype, at::Device device) {
  if (AdapterVersionPtr alive = image.alive.lock();
      alive != nullptr && alive->weights_N.device().type() == device.type()) {
    return alive;
  }
  auto version = std::make_shared<AdapterVersion>();
  version->number = image.number;
  version->layout = layout;
  version->weights_N = ops::BulkCopyTo(image.weights_N, device);
  version->compute_N = version->weights_N.to(compute_dtype);
  return version;
}

std::vector<at::Tensor*> AdapterImage::Tensors() {
  std::vector<at::Tensor*> tensors = {&gradient_N, &moment1_N, &moment2_N};
  for (VersionImage& version : versions) tensors.push_back(&version.weights_N);
  return tensors;
}

uint64_t AdapterImage::NumBytes(int64_t num_parameters, size_t num_versions) {
  return (3 + num_versions) * num_parameters * sizeof(float);
}

Adapter::Adapter(const LoraConfig& config,
                 const model_config::ModelShape& shape,
                 at::ScalarType compute_dtype, at::Device device)
    : config_(config),
      layout_(std::make_shared<AdapterLayout>(shape, config)),
      compute_dtype_(compute_dtype) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  const int64_t size = layout_->num_parameters();
  gradient_N_ = at::zeros({size}, options);
  scratch_N_ = at::zeros({size}, options);
  moment1_N_ = at::zeros({size}, options);
  moment2_N_ = at::zeros({size}, options);
  at::Tensor weights = at::empty({size}, options);
  FromVector(InitialWeights(*layout_, config.seed), weights);
  Publish(std::move(weights));
}

Adapter::Adapter(const LoraConfig& config,
                 std::shared_ptr<const AdapterLayout> layout,
                 const AdapterImage& image, at::ScalarType compute_dtype,
                 at::Device device)
    : config_(config),
      layout_(std::move(layout)),
      compute_dtype_(compute_dtype),
      latest_(RestoreVersion(image.versions.front(), layout_, compute_dtype,
                             device)),
      gradient_N_(ops::BulkCopyTo(image.gradient_N, device)),
      scratch_N_(at::zeros_like(gradient_N_)),
      moment1_N_(ops::BulkCopyTo(image.moment1_N, device)),
      moment2_N_(ops::BulkCopyTo(image.moment2_N, device)),
      optim_steps_(image.optim_steps),
      optimizer_(image.optimizer),
      accumulated_tokens_(image.accumulated_tokens) {}

AdapterImage Adapter::ToImage() const {
  return {.optim_steps = optim_steps_,
          .optimizer = optimizer_,
          .accumulated_tokens = accumulated_tokens_,
          .gradient_N = ops::BulkCopyTo(gradient_N_, at::kCPU),
          .moment1_N = ops::BulkCopyTo(moment1_N_, at::kCPU),
          .moment2_N = ops::BulkCopyTo(moment2_N_, at::kCPU),
          .versions = {ImageOf(latest_)}};
}

uint64_t Adapter::resident_bytes() const {
  const uint64_t masters = 5 * layout_->num_parameters() * sizeof(float);
  const bool has_copy = compute_dtype_ != at::kFloat;
  return masters + (has_copy ? latest_->compute_N.nbytes() : 0);
}

at::Tensor Adapter::NextWeights() {
  const bool reuses = latest_.use_count() == 1;
  if (compute_dtype_ != at::kFloat) {
    next_compute_N_ =
        reuses ? latest_->compute_N : at::empty_like(latest_->compute_N);
  }
  return reuses ? latest_->weights_N : at::empty_like(latest_->weights_N);
}

void Adapter::FinishStep(at::Tensor next_weights, Optimizer optimizer) {
  ++optim_steps_;
  optimizer_ = optimizer;
  ClearGradient();
  Publish(std::move(next_weights));
}

AdapterState Adapter::GetState() const {
  return {.weights = ToVector(latest_->weights_N),
          .gradient = ToVector(gradient_N_),
          .moment1 = ToVector(moment1_N_),
          .moment2 = ToVector(moment2_N_),
          .optim_steps = optim_steps_,
          .optimizer = optimizer_,
          .accumulated_tokens = accumulated_tokens_};
}

void Adapter::SetState(const AdapterState& state) {
  at::Tensor weights = NextWeights();
  FromVector(state.weights, weights);
  FromVector(state.gradient, gradient_N_);
  FromVector(state.moment1, moment1_N_);
  FromVector(state.moment2, moment2_N_);
  optim_steps_ = state.optim_steps;
  optimizer_ = state.optimizer;
  accumulated_tokens_ = state.accumulated_tokens;
  Publish(std::move(weights));
}

void Adapter::Publish(at::Tensor weights) {
  auto version = std::make_shared<AdapterVersion>();
  version->number = latest_ ? latest_->number + 1 : 1;
  version->layout = layout_;
  if (next_compute_N_.defined()) {
    next_compute_N_.copy_(weights);
    version->compute_N = std::exchange(next_compute_N_, {});
  } else {
    version->compute_N = weights.to(compute_dtype_);
  }
  version->weights_N = std::move(weights);
  latest_ = std::move(version);
}

at::Tensor GradientOf(const LoraGradients& gradients,
                      const AdapterVersionPtr& version) {
  const auto found =
      std::ranges::find(gradients, version, &LoraGradient::version);
  return found == gradients.end() ? at::Tensor() : found->gradient_N;
}

LoraGradients ZeroGradients(const std::vector<AdapterVersionPtr>& versions,
                            at::Device device) {
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  LoraGradients gradients;
  for (const AdapterVersionPtr& version : versions) {
    gradients.push_back({.version = version,
                         .gradient_N = at::zeros(
                             {version->layout->num_parameters()}, options)});
  }
  return gradients;
}

}  // namespace weft::lora
