#include "src/lora/lora_init.h"

#include <cmath>
#include <numbers>

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

}  // namespace weft::lora
