#include "src/lora/expert_table.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/lora/table_slots.h"
#include "src/ops/cpu_dispatch.h"

namespace weft::lora::cuda {
namespace {

namespace k = kernels::cuda;

ModelShape OneExpertLayer(const ModelShape& shape) {
  ModelShape one = shape.OfExpert(/*expert=*/0);
  one.num_layers = 1;
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

  [[nodiscard]] bool has_matrices() const {
    return !gate_up_.factors.empty() || !down_.factors.empty();
  }
  // Returns where the first matrix starts. REQUIRES: has_matrices().
  [[nodiscard]] int64_t start() const {
    const GroupLayout& first = gate_up_.factors.empty() ? down_ : gate_up_;
    return first.factors.front().a_offset;
  }
  // Returns the contents of all slots, with offsets relative to start().
  // `shape` is the result of OneExpertLayer.
  [[nodiscard]] std::vector<k::LoraMatrix> Slots(
      const ModelShape& shape) const {
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

}  // namespace

bool FitsExpertTable(const ExpertRouting& routing) {
  int64_t blocks = 0;
  for (const LoraSegment& segment : routing.segments) {
    blocks += ops::CeilDiv(segment.end - segment.begin, k::kLoraBlockRows);
  }
  return blocks <= kMaxExpertBlocks;
}

ExpertTable::ExpertTable(const ExpertRouting& routing, int layer,
                         const LoraGradients& gradients,
                         const ModelShape& shape, at::Device device)
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

}  // namespace weft::lora::cuda
