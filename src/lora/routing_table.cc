// Implements TakesSegments, RoutingTable and DecodeTable of lora_cuda.h.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "kernels/cuda/lora_product.h"
#include "src/lora/lora_cuda.h"
#include "src/lora/table_slots.h"
#include "src/ops/host_copy.h"

namespace weft::lora::cuda {
namespace {

namespace k = kernels::cuda;

constexpr std::array kLayerGroups = {ProjectionGroup::kQkv, ProjectionGroup::kO,
                                     ProjectionGroup::kGateUp,
                                     ProjectionGroup::kDown};

// Calls visit(site) for every site that has slots.
template <typename Visit>
void ForSites(const ModelShape& shape, Visit visit) {
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (const ProjectionGroup group : kLayerGroups) {
      visit(LoraSite{layer, group});
    }
  }
  visit(LoraSite{shape.num_layers, ProjectionGroup::kLmHead});
}

// Returns the contents of all slots for an adapter's layout.
std::vector<k::LoraMatrix> SlotsOf(const AdapterLayout& layout,
                                   const ModelShape& shape) {
  std::vector<k::LoraMatrix> slots(static_cast<size_t>(NumSlots(shape)));
  ForSites(shape, [&](const LoraSite& site) {
    SetSlots(layout.group(site.layer, site.group), site.group,
             FirstSlot(shape, site), /*start=*/0, slots);
  });
  return slots;
}

// Returns the number of counters that the table's largest product needs.
int64_t NumCounters(const RoutingTable& table) {
  int64_t most = 0;
  ForSites(table.shape(), [&](const LoraSite& site) {
    most = std::max({most, LoraCounters(table.ProductsOfA(site)),
                     LoraCounters(table.ProductsOfB(site))});
  });
  return most;
}

// Adds entries for the few-rows kernels.
void AddDecodeRows(const LoraRouting& routing, LayoutList* layouts,
                   k::LoraTableBuilder* builder) {
  for (const LoraSegment& segment : routing) {
    builder->AddFewRows(segment.begin, segment.end - segment.begin,
                        layouts->NumberOf(*segment.version->layout),
                        segment.version->compute_N.const_data_ptr());
  }
}

// Returns the largest rank of every slot if each factor has the rank `rank`.
// The head's slots get rank 0, because a DecodeTable leaves out LoRA of the
// head.
std::vector<int32_t> LargestRanks(const ModelShape& shape, int64_t rank) {
  std::vector<int32_t> ranks(static_cast<size_t>(NumSlots(shape)));
  ForSites(shape, [&](const LoraSite& site) {
    if (site.group == ProjectionGroup::kLmHead) return;
    const int64_t first = FirstSlot(shape, site);
    const auto num_modules = static_cast<int64_t>(ModulesOf(site.group).size());
    ranks[first] = static_cast<int32_t>(num_modules * rank);
    for (int64_t i = 1; i <= num_modules; ++i) {
      ranks[first + i] = static_cast<int32_t>(rank);
    }
  });
  return ranks;
}

}  // namespace

bool TakesSegments(const LoraRouting& routing, at::ScalarType dtype,
                   at::Device device) {
  if (!device.is_cuda() || dtype != at::kBFloat16) return false;
  return !routing.empty() &&
         std::ranges::all_of(routing, [](const LoraSegment& segment) {
           return segment.version->compute_N.scalar_type() == at::kBFloat16;
         });
}

RoutingTable::RoutingTable(const LoraRouting& routing,
                           const LoraGradients& gradients,
                           const ModelShape& shape, at::Device device,
                           bool decode)
    : RoutingTable(shape, routing.empty() ? 0 : routing.back().end) {
  k::LoraTableBuilder builder(NumSlots(shape));
  LayoutList layouts;
  if (decode) AddDecodeRows(routing, &layouts, &builder);
  for (const LoraSegment& segment : routing) {
    if (decode) break;
    const at::Tensor gradient_N = GradientOf(gradients, segment.version);
    builder.AddSegment(
        segment.begin, segment.end - segment.begin,
        layouts.NumberOf(*segment.version->layout),
        segment.version->compute_N.const_data_ptr(),
        gradient_N.defined() ? gradient_N.mutable_data_ptr<float>() : nullptr);
  }
  for (const AdapterLayout* layout : layouts.all()) {
    AddLayout(SlotsOf(*layout, shape), builder);
  }
  Upload(builder, device);
}

RoutingTable::RoutingTable(const ModelShape& shape, int64_t end_row)
    : shape_(shape),
      max_ranks_(static_cast<size_t>(NumSlots(shape))),
      end_row_(end_row) {}

void RoutingTable::AddLayout(const std::vector<k::LoraMatrix>& slots,
                             k::LoraTableBuilder& builder) {
  for (size_t i = 0; i < slots.size(); ++i) {
    max_ranks_[i] = std::max(max_ranks_[i], slots[i].rank);
  }
  builder.AddLayout(slots);
}

void RoutingTable::Upload(k::LoraTableBuilder& builder, at::Device device) {
  const std::vector<std::byte> bytes = builder.Finish();
  bytes_ = ops::ToDevice(std::span(bytes), device);
  table_ = builder.At(bytes_.const_data_ptr());
  counters_ = at::zeros({NumCounters(*this)},
                        at::TensorOptions(device).dtype(at::kInt));
}

k::LoraProduct RoutingTable::ProductsOfA(const LoraSite& site) const {
  const int64_t slot = FirstSlot(shape_, site);
  k::LoraProduct product = {.table = table_,
                            .order = k::LoraOrder::kRankByFeatures,
                            .num_projections = 1,
                            .max_rank = max_ranks_[slot],
                            .counters = Counters()};
  product.projections[0] = {
      .slot = slot, .features = InWidth(shape_, ModulesOf(site.group).front())};
  return product;
}

k::LoraProduct RoutingTable::ProductsOfB(const LoraSite& site) const {
  k::LoraProduct product = {.table = table_,
                            .order = k::LoraOrder::kFeaturesByRank,
                            .counters = Counters()};
  int64_t slot = FirstSlot(shape_, site);
  for (const TargetModule module : ModulesOf(site.group)) {
    ++slot;
    if (max_ranks_[slot] == 0) continue;
    product.max_rank = std::max<int64_t>(product.max_rank, max_ranks_[slot]);
    product.projections[product.num_projections++] = {
        .slot = slot,
        .column = LoraSite::ColumnOf(module, shape_),
        .features = OutWidth(shape_, module)};
  }
  return product;
}

unsigned* RoutingTable::Counters() const {
  return counters_.defined() ? static_cast<unsigned*>(counters_.data_ptr())
                             : nullptr;
}

DecodeTable::DecodeTable(const DecodeCapacity& capacity,
                         const ModelShape& shape)
    : RoutingTable(shape, capacity.rows),
      capacity_(capacity),
      layout_({.num_slots = NumSlots(shape),
               .max_layouts = capacity.layouts,
               .max_rows = capacity.rows}) {
  max_ranks_ = LargestRanks(shape, capacity.rank);
}

bool DecodeTable::Fits(const LoraRouting& routing) const {
  LayoutList layouts;
  for (const LoraSegment& segment : routing) {
    const AdapterLayout& layout = *segment.version->layout;
    layouts.NumberOf(layout);
    if (segment.end > capacity_.rows || layout.max_rank() > capacity_.rank) {
      return false;
    }
  }
  return static_cast<int64_t>(layouts.all().size()) <= capacity_.layouts;
}

void DecodeTable::Write(const LoraRouting& routing,
                        std::span<std::byte> host) const {
  TORCH_CHECK(host.size() == num_bytes() && Fits(routing),
              "a routing beyond the capacity of its table");
  k::LoraTableBuilder builder(layout_.num_slots);
  LayoutList layouts;
  AddDecodeRows(routing, &layouts, &builder);
  for (const AdapterLayout* layout : layouts.all()) {
    builder.AddLayout(SlotsOf(*layout, shape_));
  }
  builder.WriteTo(layout_, host);
}

}  // namespace weft::lora::cuda
