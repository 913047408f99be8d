// A shape with odd widths, for CPU tests of the adapters' products. The widths
// hidden, q and ffn do not consist of whole vectors, slices or panels. So one
// panel can contain outputs of several projections.
#ifndef WEFT_TESTS_LORA_ODD_WIDTHS_H_
#define WEFT_TESTS_LORA_ODD_WIDTHS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/lora/lora_linear.h"

namespace weft::lora {

inline constexpr model_config::ModelShape kShape = {.num_layers = 1,
                                                    .hidden = 37,
                                                    .q_width = 210,
                                                    .kv_width = 16,
                                                    .ffn = 201,
                                                    .vocab = 8};
inline constexpr LoraSite kQkv = {0, ProjectionGroup::kQkv};
inline constexpr LoraSite kDown = {0, ProjectionGroup::kDown};

// The numbers of inputs and outputs of a site's base weight.
struct OddWidths {
  int64_t in, out;
};
inline OddWidths OddWidthsOf(const LoraSite& site) {
  if (site.group == ProjectionGroup::kDown) return {kShape.ffn, kShape.hidden};
  return {kShape.hidden, kShape.q_width + 2 * kShape.kv_width};
}

// Lays out the segments in order. Puts `gap` rows without an adapter before
// each segment.
inline LoraRouting SideBySide(const std::vector<int64_t>& sizes,
                              const std::vector<AdapterVersionPtr>& versions,
                              int64_t gap) {
  LoraRouting routing;
  int64_t end = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t begin = end + gap;
    end = begin + sizes[i];
    routing.push_back({.begin = begin, .end = end, .version = versions[i]});
  }
  return routing;
}

// Returns each version once.
inline std::vector<AdapterVersionPtr> VersionsOf(const LoraRouting& routing) {
  std::vector<AdapterVersionPtr> versions;
  for (const LoraSegment& segment : routing) {
    if (std::ranges::find(versions, segment.version) == versions.end()) {
      versions.push_back(segment.version);
    }
  }
  return versions;
}

}  // namespace weft::lora

#endif  // WEFT_TESTS_LORA_ODD_WIDTHS_H_
