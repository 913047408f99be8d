#include "src/lora/lora_cuda.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/lora/lora_expert_rows.h"
#include "kernels/cuda/lora/lora_few_rows.h"
#include "kernels/cuda/lora/lora_gradient.h"
#include "kernels/cuda/lora/lora_product.h"
#include "kernels/cuda/lora/lora_table.h"
#include "src/lora/adapter_layout.h"
#include "src/lora/lora_linear.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/host_copy.h"

namespace weft::lora::cuda {
namespace {

namespace k = kernels::cuda;

// A slot is the place of one matrix in an adapter's buffer. A site has a slot
// for its stacked A, and then a slot for the B of each projection.
constexpr int64_t kSlotsPerSite = 1 + k::kMaxLoraProjections;

// Numbers the distinct layouts of a routing. All layouts are for the same
// ModelShape and outlive the list.
class LayoutList {
 public:
  // Returns the layout's number. The first layout has number 0, and each new
  // one has the next number.
  int NumberOf(const AdapterLayout& layout);
  const std::vector<const AdapterLayout*>& all() const { return layouts_; }

 private:
  std::vector<const AdapterLayout*> layouts_;
};

// Returns whether two layouts for the same ModelShape are equal.
bool SameLayout(const AdapterLayout& a, const AdapterLayout& b) {
  if (&a == &b) return true;
  const LoraConfig& x = a.config();
  const LoraConfig& y = b.config();
  return x.rank == y.rank && x.alpha == y.alpha &&
         x.target_modules == y.target_modules && x.overrides == y.overrides;
}

// In addition, each layer of experts has the slots of expert 0, for gate and up
// and then for down, and a slot whose offset is the distance between the
// matrices of one expert and those of the next.
constexpr int64_t kExpertDistance = 2 * kSlotsPerSite;
constexpr int64_t kExpertSlots = kExpertDistance + 1;

// Returns the first slot of the experts of a layer.
int64_t FirstExpertSlot(const model_config::ModelShape& shape, int layer) {
  return (shape.num_layers * kGroupsPerLayer + 1) * kSlotsPerSite +
         shape.experts.LayersBefore(layer) * kExpertSlots;
}

// Returns the number of slots for all linear layers of a model and its head.
int64_t NumSlots(const model_config::ModelShape& shape) {
  return (shape.num_layers * kGroupsPerLayer + 1) * kSlotsPerSite +
         shape.experts.num_layers() * kExpertSlots;
}

// Returns the first slot of a site.
int64_t FirstSlot(const model_config::ModelShape& shape, const LoraSite& site) {
  const int64_t index =
      site.group == ProjectionGroup::kLmHead
          ? shape.num_layers * kGroupsPerLayer
          : site.layer * kGroupsPerLayer + IndexInLayer(site.group);
  return index * kSlotsPerSite;
}

// Sets the slots of a site, whose first slot is `first`. A slot's offsets count
// from `start` in the adapter's buffer. Leaves the slots unchanged if the
// adapter does not adapt the site.
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

// Returns the site of a layer's group. In a layer of experts, the MLP's groups
// are those of the shared expert, because every row passes through it. If there
// is none, no adapter has LoRA at the site.
LoraSite SiteOf(const model_config::ModelShape& shape, int layer,
                ProjectionGroup group) {
  const bool is_shared = shape.experts.InLayer(layer) &&
                         shape.experts.shared_ffn > 0 && IsOfMlp(group);
  return {layer, group, is_shared ? shape.experts.count : kNoExpert};
}

// Calls visit(site) for every site that has slots.
template <typename Visit>
void ForSites(const model_config::ModelShape& shape, Visit visit) {
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (const ProjectionGroup group : GroupsOf(shape, layer)) {
      visit(SiteOf(shape, layer, group));
    }
  }
  visit(LoraSite{shape.num_layers, ProjectionGroup::kLmHead});
}

// Calls visit(layer) for every layer of experts.
template <typename Visit>
void ForExpertLayers(const model_config::ModelShape& shape, Visit visit) {
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    if (shape.experts.InLayer(layer)) visit(layer);
  }
}

// Sets the slots of a layer's experts. If the rank lacks the first experts,
// leaves the slots unchanged, because no decode pass uses them then.
void SetExpertSlots(const AdapterLayout& layout,
                    const model_config::ModelShape& shape, int layer,
                    std::vector<k::LoraMatrix>& slots) {
  const int64_t first = FirstExpertSlot(shape, layer);
  int64_t slot = first;
  for (const ProjectionGroup group :
       {ProjectionGroup::kGateUp, ProjectionGroup::kDown}) {
    const GroupLayout& zero = layout.group(layer, group, /*expert=*/0);
    SetSlots(zero, group, slot, /*start=*/0, slots);
    slot += kSlotsPerSite;
    if (shape.experts.count == 1 || zero.factors.empty()) continue;
    const GroupLayout& one = layout.group(layer, group, /*expert=*/1);
    if (one.factors.empty()) continue;
    slots[first + kExpertDistance].offset =
        one.factors.front().a_offset - zero.factors.front().a_offset;
  }
}

// Returns the contents of all slots for an adapter's layout.
std::vector<k::LoraMatrix> SlotsOf(const AdapterLayout& layout,
                                   const model_config::ModelShape& shape) {
  std::vector<k::LoraMatrix> slots(static_cast<size_t>(NumSlots(shape)));
  ForSites(shape, [&](const LoraSite& site) {
    SetSlots(layout.group(site.layer, site.group, site.expert), site.group,
             FirstSlot(shape, site), /*start=*/0, slots);
  });
  ForExpertLayers(
      shape, [&](int layer) { SetExpertSlots(layout, shape, layer, slots); });
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
std::vector<int32_t> LargestRanks(const model_config::ModelShape& shape,
                                  int64_t rank) {
  std::vector<int32_t> ranks(static_cast<size_t>(NumSlots(shape)));
  const auto set = [&](int64_t first, ProjectionGroup group) {
    const auto num_modules = static_cast<int64_t>(ModulesOf(group).size());
    ranks[first] = static_cast<int32_t>(num_modules * rank);
    for (int64_t i = 1; i <= num_modules; ++i) {
      ranks[first + i] = static_cast<int32_t>(rank);
    }
  };
  ForSites(shape, [&](const LoraSite& site) {
    if (site.group == ProjectionGroup::kLmHead) return;
    set(FirstSlot(shape, site), site.group);
  });
  ForExpertLayers(shape, [&](int layer) {
    const int64_t first = FirstExpertSlot(shape, layer);
    set(first, ProjectionGroup::kGateUp);
    set(first + kSlotsPerSite, ProjectionGroup::kDown);
  });
  return ranks;
}

model_config::ModelShape OneExpertLayer(const model_config::ModelShape& shape) {
  model_config::ModelShape one = shape.OfExpert(/*expert=*/0);
  one.num_layers = 1;
  one.experts = {};
  return one;
}

// The matrices of one expert in an adapter. The matrices are adjacent in the
// adapter's buffer.
class ExpertPlaces {
 public:
  // `layout` outlives the object.
  ExpertPlaces(const AdapterLayout& layout, int layer, int expert)
      : gate_up_(layout.group(layer, ProjectionGroup::kGateUp, expert)),
        down_(layout.group(layer, ProjectionGroup::kDown, expert)) {}

  bool has_matrices() const {
    return !gate_up_.factors.empty() || !down_.factors.empty();
  }
  // Returns where the first matrix starts. REQUIRES: has_matrices().
  int64_t start() const {
    const GroupLayout& first = gate_up_.factors.empty() ? down_ : gate_up_;
    return first.factors.front().a_offset;
  }
  // Returns the contents of all slots, with offsets relative to start().
  // `shape` is the result of OneExpertLayer.
  std::vector<k::LoraMatrix> Slots(
      const model_config::ModelShape& shape) const {
    std::vector<k::LoraMatrix> slots(static_cast<size_t>(NumSlots(shape)));
    const auto set = [&](const GroupLayout& layout, ProjectionGroup group) {
      SetSlots(layout, group, FirstSlot(shape, {.group = group}), start(),
               slots);
    };
    set(gate_up_, ProjectionGroup::kGateUp);
    set(down_, ProjectionGroup::kDown);
    return slots;
  }

 private:
  const GroupLayout& gate_up_;
  const GroupLayout& down_;
};

void Check(cudaError_t status, const char* what) {
  TORCH_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

at::Tensor Workspace(int64_t num_floats, const at::Tensor& like) {
  return at::empty({num_floats}, like.options().dtype(at::kFloat));
}

// Returns `product` with these tensors as its operands. The tensors are 2-D,
// and the elements of a row are adjacent.
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

// Returns the arguments of a site's products for segments of few rows. If y_TO
// or s_TR is undefined, its address in the result is null.
k::LoraFewRowsProduct OfFewRows(const at::Tensor& x_TI, const at::Tensor& y_TO,
                                const at::Tensor& s_TR,
                                const k::LoraProduct& of_a,
                                const k::LoraProduct& of_b) {
  k::LoraFewRowsProduct product = {.table = of_a.table,
                                   .slot_of_a = of_a.projections[0].slot,
                                   .max_rank = of_a.max_rank,
                                   .num_projections = of_b.num_projections,
                                   .max_projection_rank = of_b.max_rank,
                                   .x_TI = x_TI.const_data_ptr(),
                                   .x_stride = x_TI.stride(0),
                                   .inputs = of_a.projections[0].features};
  std::ranges::copy(of_b.projections, product.projections);
  if (y_TO.defined()) {
    product.y_TO = y_TO.data_ptr();
    product.y_stride = y_TO.stride(0);
  }
  if (s_TR.defined()) {
    product.shrunk_TR = s_TR.data_ptr();
    product.shrunk_stride = s_TR.stride(0);
  }
  return product;
}

// Computes x A^T for the segments of few rows. Then calls `then`, a launch that
// uses x A^T.
void RunFewRows(k::LoraFewRowsProduct product, const at::Tensor& x_TI,
                cudaError_t (*then)(const k::LoraFewRowsProduct&, cudaStream_t),
                CUstream_st* stream) {
  if (product.table.max_few == 0) return;
  const at::Tensor workspace = Workspace(LoraFewRowsWorkspace(product), x_TI);
  product.workspace = workspace.mutable_data_ptr<float>();
  Check(RunLoraFewRowsShrink(product, stream), "product of the adapters");
  Check(then(product, stream), "product of the adapters");
}

// Allocates S for all rows.
at::Tensor EmptyShrunk(const at::Tensor& x_TI, const k::LoraProduct& of_a) {
  return at::empty({x_TI.size(0), of_a.max_rank}, x_TI.options());
}

// Limits the product to the segments that the few-rows kernels do not compute.
k::LoraProduct LongSegments(k::LoraProduct product) {
  product.table = product.table.LongSegments();
  return product;
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
           return segment.version->compute_N.scalar_type() == at::kBFloat16;
         });
}

RoutingTable::RoutingTable(const LoraRouting& routing,
                           const LoraGradients& gradients,
                           const model_config::ModelShape& shape,
                           at::Device device, bool decode)
    : RoutingTable(shape, routing.empty() ? 0 : routing.back().end) {
  is_decode_ = decode;
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

RoutingTable::RoutingTable(const model_config::ModelShape& shape,
                           int64_t end_row)
    : shape_(shape),
      shared_shape_(shape.OfExpert(shape.experts.count)),
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
      .slot = slot,
      .features = InWidth(ShapeAt(site), ModulesOf(site.group).front())};
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
        .column = LoraSite::ColumnOf(module, ShapeAt(site)),
        .features = OutWidth(ShapeAt(site), module)};
  }
  return product;
}

unsigned* RoutingTable::Counters() const {
  return counters_.defined() ? static_cast<unsigned*>(counters_.data_ptr())
                             : nullptr;
}

std::shared_ptr<const RoutingTable> RoutingTable::OfExperts(
    int layer, const at::Tensor& experts_TK, const at::Tensor& pairs_N,
    CUstream_st* stream) const {
  TORCH_CHECK(is_decode_, "the table of a decode pass alone serves experts");
  const model_config::ModelShape one = OneExpertLayer(shape_);
  const int64_t num_rows = pairs_N.size(0);
  const std::shared_ptr<RoutingTable> table(new RoutingTable(one, num_rows));
  // The layer's slots are in the places of those of the one-layer model.
  const int64_t first = FirstExpertSlot(shape_, layer);
  const int64_t place = FirstSlot(one, {.group = ProjectionGroup::kGateUp});
  std::copy_n(max_ranks_.begin() + first, kExpertDistance,
              table->max_ranks_.begin() + place);
  // The last of these entries has the memory of their number.
  table->bytes_ = at::empty({(num_rows + 1) * int64_t{sizeof(k::LoraFewRows)}},
                            experts_TK.options().dtype(at::kByte));
  auto* few =
      reinterpret_cast<k::LoraFewRows*>(table->bytes_.mutable_data_ptr());
  auto* num_few = reinterpret_cast<int64_t*>(few + num_rows);
  Check(
      k::FindLoraExpertRows({.batch = table_,
                             .slot_of_gate_up = first,
                             .slot_of_down = first + kSlotsPerSite,
                             .slot_of_distance = first + kExpertDistance,
                             .experts_TK = experts_TK.const_data_ptr<int64_t>(),
                             .pairs_N = pairs_N.const_data_ptr<int64_t>(),
                             .num_rows = num_rows,
                             .per_token = experts_TK.size(1),
                             .few = few,
                             .num_few = num_few},
                            stream),
      "adapters of the experts' rows");
  table->table_ = {.matrices = table_.matrices + first - place,
                   .num_slots = table_.num_slots,
                   .few = few,
                   .num_few = num_few,
                   .max_few = num_rows,
                   .max_few_rows = num_rows};
  return table;
}

DecodeTable::DecodeTable(const DecodeCapacity& capacity,
                         const model_config::ModelShape& shape)
    : RoutingTable(shape, capacity.rows),
      capacity_(capacity),
      layout_({.num_slots = NumSlots(shape),
               .max_layouts = capacity.layouts,
               .max_rows = capacity.rows}) {
  is_decode_ = true;
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

bool FitsExpertTable(const ExpertRouting& routing) {
  int64_t blocks = 0;
  for (const LoraSegment& segment : routing.segments) {
    blocks += ops::CeilDiv(segment.end - segment.begin, k::kLoraBlockRows);
  }
  return blocks <= kMaxExpertBlocks;
}

ExpertTable::ExpertTable(const ExpertRouting& routing, int layer,
                         const LoraGradients& gradients,
                         const model_config::ModelShape& shape,
                         at::Device device)
    : RoutingTable(OneExpertLayer(shape), routing.segments.back().end) {
  k::LoraTableBuilder builder(NumSlots(shape_), /*max_parts=*/1);
  LayoutList layouts;
  for (size_t i = 0; i < routing.segments.size(); ++i) {
    const LoraSegment& segment = routing.segments[i];
    const AdapterVersion& version = *segment.version;
    const ExpertPlaces places(*version.layout, layer, routing.experts[i]);
    if (!places.has_matrices()) continue;
    const size_t num_known = layouts.all().size();
    const int number = layouts.NumberOf(*version.layout);
    if (layouts.all().size() > num_known) {
      AddLayout(places.Slots(shape_), builder);
    }
    const at::Tensor gradient_N = GradientOf(gradients, segment.version);
    builder.AddSegment(
        segment.begin, segment.end - segment.begin, number,
        version.compute_N.const_data_ptr<at::BFloat16>() + places.start(),
        gradient_N.defined()
            ? gradient_N.mutable_data_ptr<float>() + places.start()
            : nullptr);
  }
  Upload(builder, device);
}

at::Tensor Forward(const at::Tensor& x_TI, const RoutingTable& table,
                   const LoraSite& site, bool keeps_shrunk, at::Tensor& y_TO,
                   CUstream_st* stream) {
  const k::LoraProduct of_a = table.ProductsOfA(site);
  if (of_a.max_rank == 0) return {};
  CheckRows(x_TI, table);
  CheckRows(y_TO, table);
  const k::LoraProduct of_b = table.ProductsOfB(site);
  at::Tensor s_TR;
  if (keeps_shrunk) s_TR = EmptyShrunk(x_TI, of_a);
  RunFewRows(OfFewRows(x_TI, y_TO, s_TR, of_a, of_b), x_TI,
             k::RunLoraFewRowsExpand, stream);
  if (table.table().num_long_blocks > 0) {
    const at::Tensor shrunk_TR = keeps_shrunk ? s_TR : EmptyShrunk(x_TI, of_a);
    RunShrink(On(x_TI, shrunk_TR, LongSegments(of_a)), shrunk_TR, stream);
    Check(RunLoraExpand(On(y_TO, shrunk_TR, LongSegments(of_b)), stream),
          "product of the adapters");
  }
  return s_TR;
}

at::Tensor Shrink(const at::Tensor& x_TI, const RoutingTable& table,
                  const LoraSite& site, CUstream_st* stream) {
  const k::LoraProduct of_a = table.ProductsOfA(site);
  if (of_a.max_rank == 0) return {};
  CheckRows(x_TI, table);
  const at::Tensor s_TR = EmptyShrunk(x_TI, of_a);
  RunFewRows(OfFewRows(x_TI, /*y_TO=*/{}, s_TR, of_a, /*of_b=*/{}), x_TI,
             k::RunLoraFewRowsSum, stream);
  RunShrink(On(x_TI, s_TR, LongSegments(of_a)), s_TR, stream);
  return s_TR;
}

void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const at::Tensor& s_TR, const RoutingTable& table,
              const LoraSite& site, at::Tensor& dx_TI, CUstream_st* stream) {
  if (!s_TR.defined()) return;
  TORCH_CHECK(s_TR.size(0) == dy_TO.size(0), "the forward pass kept ",
              s_TR.size(0), " rows of x A^T, the backward pass has ",
              dy_TO.size(0));
  const k::LoraProduct of_a = table.ProductsOfA(site);
  const k::LoraProduct of_b = table.ProductsOfB(site);
  // ds includes each projection's scale, so one product by the stacked A serves
  // all projections.
  const at::Tensor ds_TR = at::empty_like(s_TR);
  RunShrink(On(dy_TO, ds_TR, of_b), ds_TR, stream);
  RunGradient(On(dy_TO, s_TR, of_b), s_TR, stream);
  RunGradient(On(x_TI, ds_TR, of_a), ds_TR, stream);
  if (!dx_TI.defined()) return;
  Check(RunLoraExpand(On(dx_TI, ds_TR, of_a), stream),
        "product of the adapters");
}

}  // namespace weft::lora::cuda
