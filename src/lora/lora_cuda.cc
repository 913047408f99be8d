#include "src/lora/lora_cuda.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "kernels/cuda/lora_gradient.h"
#include "kernels/cuda/lora_product.h"
#include "src/ops/host_copy.h"

namespace weft::lora::cuda {
namespace {

namespace k = kernels::cuda;

// A site's slots: its stacked A, then B of each of its projections.
constexpr int64_t kSlotsPerSite = 1 + k::kMaxLoraProjections;

constexpr std::array kLayerGroups = {ProjectionGroup::kQkv, ProjectionGroup::kO,
                                     ProjectionGroup::kGateUp,
                                     ProjectionGroup::kDown};

int64_t FirstSlot(const ModelShape& shape, const LoraSite& site) {
  const int64_t index =
      site.group == ProjectionGroup::kLmHead
          ? shape.num_layers * kGroupsPerLayer
          : site.layer * kGroupsPerLayer + static_cast<int64_t>(site.group);
  return index * kSlotsPerSite;
}

int64_t NumSlots(const ModelShape& shape) {
  return (shape.num_layers * kGroupsPerLayer + 1) * kSlotsPerSite;
}

// Configurations that lay an adapter out alike.
bool SameLayout(const AdapterLayout& a, const AdapterLayout& b) {
  if (&a == &b) return true;
  const LoraConfig& x = a.config();
  const LoraConfig& y = b.config();
  return x.rank == y.rank && x.alpha == y.alpha &&
         x.target_modules == y.target_modules && x.overrides == y.overrides;
}

void Check(cudaError_t status, const char* what) {
  TORCH_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

at::Tensor Workspace(int64_t num_floats, const at::Tensor& like) {
  return at::empty({num_floats}, like.options().dtype(at::kFloat));
}

// What every product of x A^T's side has, and what every one of B's has.
k::LoraProduct ProductsOfA(const RoutingTable& table, const LoraSite& site) {
  const int64_t slot = FirstSlot(table.shape(), site);
  k::LoraProduct product = {.table = table.table(),
                            .order = k::LoraOrder::kRankByFeatures,
                            .num_projections = 1,
                            .max_rank = table.MaxRank(slot),
                            .counters = table.counters()};
  product.projections[0] = {
      .slot = slot,
      .features = InWidth(table.shape(), ModulesOf(site.group).front())};
  return product;
}

k::LoraProduct ProductsOfB(const RoutingTable& table, const LoraSite& site) {
  const int64_t first = FirstSlot(table.shape(), site);
  k::LoraProduct product = {.table = table.table(),
                            .order = k::LoraOrder::kFeaturesByRank,
                            .counters = table.counters()};
  int64_t slot = first;
  for (const TargetModule module : ModulesOf(site.group)) {
    ++slot;
    if (table.MaxRank(slot) == 0) continue;
    product.max_rank = std::max(product.max_rank, table.MaxRank(slot));
    product.projections[product.num_projections++] = {
        .slot = slot,
        .column = LoraSite::ColumnOf(module, table.shape()),
        .features = OutWidth(table.shape(), module)};
  }
  return product;
}

// What the largest of a table's products takes.
int64_t NumCounters(const RoutingTable& table) {
  int64_t most = 0;
  const auto count = [&](const LoraSite& site) {
    most = std::max({most, LoraCounters(ProductsOfA(table, site)),
                     LoraCounters(ProductsOfB(table, site))});
  };
  const int num_layers = table.shape().num_layers;
  for (int layer = 0; layer < num_layers; ++layer) {
    for (const ProjectionGroup group : kLayerGroups) count({layer, group});
  }
  count({num_layers, ProjectionGroup::kLmHead});
  return most;
}

// The product on tensors, 2-D with unit stride in their columns.
k::LoraProduct On(const at::Tensor& features_TF, const at::Tensor& shrunk_TR,
                  k::LoraProduct product) {
  product.features_TF = features_TF.data_ptr();
  product.features_stride = features_TF.stride(0);
  product.shrunk_TR = shrunk_TR.data_ptr();
  product.shrunk_stride = shrunk_TR.stride(0);
  return product;
}

void RunShrink(k::LoraProduct product, const at::Tensor& shrunk_TR,
               CUstream_st* stream) {
  const at::Tensor workspace =
      Workspace(LoraShrinkWorkspace(product), shrunk_TR);
  product.workspace = workspace.mutable_data_ptr<float>();
  Check(RunLoraShrink(product, stream), "product of the adapters");
}

void RunGradient(k::LoraProduct product, const at::Tensor& shrunk_TR,
                 CUstream_st* stream) {
  const at::Tensor workspace =
      Workspace(LoraGradientWorkspace(product), shrunk_TR);
  product.workspace = workspace.mutable_data_ptr<float>();
  Check(AddLoraGradient(product, stream), "gradient of the adapters");
}

void CheckRows(const at::Tensor& rows_T, const RoutingTable& table) {
  TORCH_CHECK(rows_T.size(0) >= table.end_row(), "the segments end at row ",
              table.end_row(), " > ", rows_T.size(0), " rows");
}

}  // namespace

bool TakesSegments(const LoraRouting& routing, at::ScalarType dtype,
                   at::Device device) {
  if (!device.is_cuda() || dtype != at::kBFloat16) return false;
  return !routing.empty() &&
         std::ranges::all_of(routing, [](const LoraSegment& segment) {
           return segment.version->compute_N.scalar_type() == at::kBFloat16 &&
                  (!segment.gradient_N.defined() ||
                   segment.gradient_N.scalar_type() == at::kFloat);
         });
}

RoutingTable::RoutingTable(const LoraRouting& routing, const ModelShape& shape,
                           at::Device device)
    : shape_(shape),
      max_ranks_(NumSlots(shape)),
      end_row_(routing.empty() ? 0 : routing.back().end) {
  k::LoraTableBuilder builder(NumSlots(shape));
  std::vector<const AdapterLayout*> layouts;
  for (const LoraSegment& segment : routing) {
    const AdapterLayout& layout = *segment.version->layout;
    const auto known = std::ranges::find_if(
        layouts,
        [&](const AdapterLayout* other) { return SameLayout(*other, layout); });
    const auto number = static_cast<int>(known - layouts.begin());
    if (known == layouts.end()) {
      layouts.push_back(&layout);
      builder.AddLayout(SlotsOf(layout));
    }
    builder.AddSegment(segment.begin, segment.end - segment.begin, number,
                       segment.version->compute_N.const_data_ptr(),
                       segment.gradient_N.defined()
                           ? segment.gradient_N.mutable_data_ptr<float>()
                           : nullptr);
  }
  const std::vector<std::byte> bytes = builder.Finish();
  bytes_ = ops::ToDevice(std::span(bytes), device);
  table_ = builder.At(bytes_.const_data_ptr());
  counters_ = at::zeros({NumCounters(*this)},
                        at::TensorOptions(device).dtype(at::kInt));
}

std::vector<k::LoraMatrix> RoutingTable::SlotsOf(const AdapterLayout& layout) {
  std::vector<k::LoraMatrix> slots(max_ranks_.size());
  const auto set = [&](int64_t slot, int64_t offset, int64_t rank,
                       int64_t column, double scale) {
    slots[slot] = {.offset = offset,
                   .rank = static_cast<int32_t>(rank),
                   .column = static_cast<int32_t>(column),
                   .scale = static_cast<float>(scale)};
    max_ranks_[slot] = std::max(max_ranks_[slot], slots[slot].rank);
  };
  const auto set_site = [&](const LoraSite& site) {
    const GroupLayout& group = layout.group(site.layer, site.group);
    if (group.factors.empty()) return;
    const int64_t first = FirstSlot(shape_, site);
    set(first, group.factors.front().a_offset, group.total_rank, 0, 1);
    const auto modules = ModulesOf(site.group);
    int64_t column = 0;
    for (const LoraFactor& factor : group.factors) {
      const auto at = std::ranges::find(modules, factor.module);
      set(first + 1 + (at - modules.begin()), factor.b_offset, factor.rank,
          column, factor.scale);
      column += factor.rank;
    }
  };
  for (int layer = 0; layer < shape_.num_layers; ++layer) {
    for (const ProjectionGroup group : kLayerGroups) set_site({layer, group});
  }
  set_site({shape_.num_layers, ProjectionGroup::kLmHead});
  return slots;
}

at::Tensor Shrink(const at::Tensor& x_TI, const RoutingTable& table,
                  const LoraSite& site, CUstream_st* stream) {
  const k::LoraProduct product = ProductsOfA(table, site);
  if (product.max_rank == 0) return {};
  CheckRows(x_TI, table);
  at::Tensor s_TR = at::empty({x_TI.size(0), product.max_rank}, x_TI.options());
  RunShrink(On(x_TI, s_TR, product), s_TR, stream);
  return s_TR;
}

void Expand(const at::Tensor& s_TR, const RoutingTable& table,
            const LoraSite& site, at::Tensor& y_TO, CUstream_st* stream) {
  if (!s_TR.defined()) return;
  CheckRows(y_TO, table);
  Check(RunLoraExpand(On(y_TO, s_TR, ProductsOfB(table, site)), stream),
        "product of the adapters");
}

void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const at::Tensor& s_TR, const RoutingTable& table,
              const LoraSite& site, at::Tensor& dx_TI, CUstream_st* stream) {
  if (!s_TR.defined()) return;
  TORCH_CHECK(s_TR.size(0) == dy_TO.size(0), "the forward pass kept ",
              s_TR.size(0), " rows of x A^T, the backward pass has ",
              dy_TO.size(0));
  const k::LoraProduct of_a = ProductsOfA(table, site);
  const k::LoraProduct of_b = ProductsOfB(table, site);
  // With the scale, so that A's products of all projections are one.
  const at::Tensor ds_TR = at::empty_like(s_TR);
  RunShrink(On(dy_TO, ds_TR, of_b), ds_TR, stream);
  RunGradient(On(dy_TO, s_TR, of_b), s_TR, stream);
  RunGradient(On(x_TI, ds_TR, of_a), ds_TR, stream);
  if (!dx_TI.defined()) return;
  Check(RunLoraExpand(On(dx_TI, ds_TR, of_a), stream),
        "product of the adapters");
}

}  // namespace weft::lora::cuda
