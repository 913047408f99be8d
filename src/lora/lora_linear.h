// A linear layer whose rows belong to different adapters:
//   y = x W^T + bias + scale_a (x A_a^T) B_a^T   for the rows of adapter a.
//
// Rows of one adapter are contiguous, so routing is a short list of segments
// and nothing is sorted or gathered. Projections that share an input are one
// base GEMM with stacked weights, one shrink with stacked A, and one expand
// each.
//
// Legend: T packed tokens, I inputs, O outputs of the (fused) base weight, R
// the sum of the ranks of the group's adapted projections, N parameters of an
// adapter.
#ifndef WEFT_SRC_LORA_LORA_LINEAR_H_
#define WEFT_SRC_LORA_LORA_LINEAR_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/lora/adapter.h"

namespace weft::lora {

// Rows [begin, end) of the packed batch use `version`; rows in no segment run
// the base alone. Segments are ordered and disjoint.
struct LoraSegment {
  int64_t begin = 0;
  int64_t end = 0;
  AdapterVersionPtr version;
  at::Tensor gradient_N;  // [N] f32, added to by the backward pass; undefined
                          // when no gradient is wanted.
};
using LoraRouting = std::vector<LoraSegment>;

// The frozen part.
struct BaseLinear {
  at::Tensor weight_OI;
  at::Tensor bias_O;  // Undefined: none.
};

// Which adapted layer, and where each of its projections writes in y.
struct LoraSite {
  int layer = 0;
  ProjectionGroup group = ProjectionGroup::kQkv;
  // Column of y where the output of `module` starts.
  [[nodiscard]] static int64_t ColumnOf(TargetModule module,
                                        const ModelShape& shape);
};

[[nodiscard]] inline const GroupLayout& GroupOf(const LoraSegment& segment,
                                                const LoraSite& site) {
  return segment.version->layout->group(site.layer, site.group);
}

// x A^T of every segment, kept for the backward pass: [rows, R] each, or
// undefined where the adapter has nothing at the site.
using ShrunkInputs = std::vector<at::Tensor>;

// Returns y [T, O]. Sets `shrunk` to one entry per segment when not null.
// Shapes:  x_TI [T, I] contiguous, dtype of the base weight, or
//          f32 beside bf16 on a CPU.
// Errors:  throws c10::Error.   Threads: engine thread only.
[[nodiscard]] at::Tensor LoraLinear(
    const at::Tensor& x_TI, const BaseLinear& base, const LoraRouting& routing,
    const LoraSite& site, const ModelShape& shape, ShrunkInputs* shrunk);

// The `shrunk` of LoraLinear, without y.
[[nodiscard]] ShrunkInputs LoraShrink(const at::Tensor& x_TI,
                                      const LoraRouting& routing,
                                      const LoraSite& site);

// Adds dLoss/dA and dLoss/dB to each segment's gradient and returns dLoss/dx
// [T, I], or an undefined tensor when `want_input_gradient` is false.
// Shapes: dy_TO as y; x_TI and shrunk as in the forward pass.
[[nodiscard]] at::Tensor LoraLinearBackward(
    const at::Tensor& dy_TO, const at::Tensor& x_TI, const BaseLinear& base,
    const LoraRouting& routing, const LoraSite& site, const ModelShape& shape,
    const ShrunkInputs& shrunk, bool want_input_gradient);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_LINEAR_H_
