#include "src/lora/lora_init.h"

#include <cmath>

namespace weft::lora {
namespace {

// SplitMix64 (Steele, Lea and Flood 2014): a counter through a mixing function,
// so every draw can be computed on its own.
uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

std::vector<float> InitialWeights(const AdapterLayout& layout, uint64_t seed) {
  std::vector<float> weights(layout.num_parameters(), 0.0f);
  for (const LoraFactor& factor : layout.factors()) {
    const uint64_t stream =
        Mix(Mix(seed) ^ (static_cast<uint64_t>(factor.layer) << 8 |
                         static_cast<uint64_t>(factor.module)));
    const double bound = 1.0 / std::sqrt(static_cast<double>(factor.in));
    const int64_t size = factor.rank * factor.in;
    for (int64_t i = 0; i < size; ++i) {
      const double uniform =
          static_cast<double>(Mix(stream + i) >> 11) * 0x1.0p-53;
      weights[factor.a_offset + i] =
          static_cast<float>((2 * uniform - 1) * bound);
    }
  }
  return weights;
}

}  // namespace weft::lora
