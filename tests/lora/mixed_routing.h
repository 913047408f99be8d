// A batch of adapters that differ in every respect, for the tests of code that
// takes all segments at once.
#ifndef WEFT_TESTS_LORA_MIXED_ROUTING_H_
#define WEFT_TESTS_LORA_MIXED_ROUTING_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "src/lora/lora_linear.h"

namespace weft::lora {

constexpr model_config::ModelShape kMixedShape = {.num_layers = 2,
                                                  .hidden = 96,
                                                  .q_width = 80,
                                                  .kv_width = 24,
                                                  .ffn = 100,
                                                  .vocab = 56};
constexpr int64_t kMixedRows = 400;
// Sites of both layers, because a routing table must not mix up the layers.
constexpr LoraSite kMixedSites[] = {
    {0, ProjectionGroup::kQkv},    {1, ProjectionGroup::kQkv},
    {0, ProjectionGroup::kGateUp}, {1, ProjectionGroup::kGateUp},
    {0, ProjectionGroup::kDown},   {1, ProjectionGroup::kDown},
    {2, ProjectionGroup::kLmHead}};

inline int64_t InputsOf(const LoraSite& site) {
  return InWidth(kMixedShape, ModulesOf(site.group).front());
}
inline int64_t OutputsOf(const LoraSite& site) {
  int64_t outputs = 0;
  for (const TargetModule module : ModulesOf(site.group)) {
    outputs += OutWidth(kMixedShape, module);
  }
  return outputs;
}

// Returns random numbers rounded to bf16, as f64 on the CPU.
inline at::Tensor RandomBf16(at::IntArrayRef sizes, double scale) {
  return (at::randn(sizes, at::kDouble) * scale)
      .to(at::kBFloat16)
      .to(at::kDouble);
}

inline AdapterVersionPtr MakeMixedVersion(
    int rank, std::vector<TargetModule> modules,
    std::vector<LoraOverride> overrides = {}) {
  auto version = std::make_shared<AdapterVersion>();
  version->layout = std::make_shared<AdapterLayout>(
      kMixedShape, LoraConfig{.rank = rank,
                              .alpha = 8,
                              .target_modules = std::move(modules),
                              .overrides = std::move(overrides)});
  version->compute_N = RandomBf16({version->layout->num_parameters()}, 0.3);
  return version;
}

// Makes segments of 1 to 200 rows, with gaps, and adapters of ranks 1 to 70.
// One adapter has different ranks in its projections, one has two segments, and
// one has only the head. Two adapters have equal configurations.
inline LoraRouting MakeMixedRouting() {
  using enum TargetModule;
  const AdapterVersionPtr long_one =
      MakeMixedVersion(33, DefaultTargetModules());
  const AdapterVersionPtr versions[] = {
      long_one,
      MakeMixedVersion(1, {kVProj, kUpProj, kDownProj}),
      MakeMixedVersion(7, {kQProj, kVProj, kOProj, kGateProj, kUpProj},
                       {{0, kQProj, {.rank = 2, .alpha = 6}},
                        {1, kVProj, {.rank = 70, .alpha = 3}},
                        {1, kUpProj, {}}}),
      long_one,
      MakeMixedVersion(33, DefaultTargetModules()),
      MakeMixedVersion(4, {kLmHead})};
  const int64_t ranges[][2] = {{3, 203},   {203, 204}, {210, 280},
                               {280, 285}, {285, 350}, {360, 395}};
  LoraRouting routing;
  for (int i = 0; i < 6; ++i) {
    routing.push_back(
        {.begin = ranges[i][0], .end = ranges[i][1], .version = versions[i]});
  }
  return routing;
}

// A routing with a gradient for each of its adapters.
struct MixedBatch {
  LoraRouting routing;
  LoraGradients gradients;

  // Returns the gradient of a segment's adapter.
  at::Tensor Gradient(size_t segment) const {
    return GradientOf(gradients, routing[segment].version);
  }
};

// Makes MakeMixedRouting's batch with nonzero gradients.
inline MixedBatch MakeMixedBatch() {
  MixedBatch batch{.routing = MakeMixedRouting()};
  for (const LoraSegment& segment : batch.routing) {
    if (GradientOf(batch.gradients, segment.version).defined()) continue;
    batch.gradients.push_back(
        {.version = segment.version,
         .gradient_N = RandomBf16(segment.version->compute_N.sizes(), 1)});
  }
  return batch;
}

// Returns the batch with converted copies of its weights and gradients.
inline MixedBatch Converted(MixedBatch batch, at::Device device,
                            at::ScalarType weights, at::ScalarType gradients) {
  for (LoraGradient& gradient : batch.gradients) {
    const AdapterVersionPtr before = gradient.version;
    auto version = std::make_shared<AdapterVersion>(*before);
    version->compute_N =
        before->compute_N.to(device, weights, false, /*copy=*/true);
    gradient.version = version;
    gradient.gradient_N =
        gradient.gradient_N.to(device, gradients, false, /*copy=*/true);
    for (LoraSegment& segment : batch.routing) {
      if (segment.version == before) segment.version = version;
    }
  }
  return batch;
}

}  // namespace weft::lora

#endif  // WEFT_TESTS_LORA_MIXED_ROUTING_H_
