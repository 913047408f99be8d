#include "src/lora/table_slots.h"

#include <algorithm>

namespace weft::lora::cuda {
namespace {

namespace k = kernels::cuda;

constexpr int64_t kSlotsPerSite = 1 + k::kMaxLoraProjections;

// Returns whether two layouts for the same ModelShape are equal.
bool SameLayout(const AdapterLayout& a, const AdapterLayout& b) {
  if (&a == &b) return true;
  const LoraConfig& x = a.config();
  const LoraConfig& y = b.config();
  return x.rank == y.rank && x.alpha == y.alpha &&
         x.target_modules == y.target_modules && x.overrides == y.overrides;
}

}  // namespace

int64_t NumSlots(const ModelShape& shape) {
  return (shape.num_layers * kGroupsPerLayer + 1) * kSlotsPerSite;
}

int64_t FirstSlot(const ModelShape& shape, const LoraSite& site) {
  const int64_t index =
      site.group == ProjectionGroup::kLmHead
          ? shape.num_layers * kGroupsPerLayer
          : site.layer * kGroupsPerLayer + static_cast<int64_t>(site.group);
  return index * kSlotsPerSite;
}

void SetSlots(const GroupLayout& layout, ProjectionGroup group, int64_t first,
              int64_t start, std::vector<k::LoraMatrix>& slots) {
  if (layout.factors.empty()) return;
  const auto set = [&](int64_t slot, int64_t offset, int64_t rank,
                       int64_t column, double scale) {
    slots[slot] = {.offset = offset - start,
                   .rank = static_cast<int32_t>(rank),
                   .column = static_cast<int32_t>(column),
                   .scale = static_cast<float>(scale)};
  };
  set(first, layout.factors.front().a_offset, layout.total_rank, 0, 1);
  const auto modules = ModulesOf(group);
  int64_t column = 0;
  for (const LoraFactor& factor : layout.factors) {
    const auto at = std::ranges::find(modules, factor.module);
    set(first + 1 + (at - modules.begin()), factor.b_offset, factor.rank,
        column, factor.scale);
    column += factor.rank;
  }
}

int LayoutList::NumberOf(const AdapterLayout& layout) {
  const auto known = std::ranges::find_if(
      layouts_,
      [&](const AdapterLayout* other) { return SameLayout(*other, layout); });
  const auto number = static_cast<int>(known - layouts_.begin());
  if (known == layouts_.end()) layouts_.push_back(&layout);
  return number;
}

}  // namespace weft::lora::cuda
