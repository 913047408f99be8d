// A linear layer whose rows belong to different adapters:
//   y = x W^T + bias + scale_a (x A_a^T) B_a^T   for the rows of adapter a.
//
// Rows of one adapter are contiguous, so the routing is a short list of
// segments, and no rows are sorted or gathered. Projections that share an input
// take one base GEMM with stacked weights and one product by the stacked A
// (shrink). Each projection then takes its own product by B (expand). Where the
// base's product is in bf16 on a CPU, so are these (lora_bf16.h).
//
// Legend: T packed tokens, I inputs, O outputs of the (fused) base weight, R
// the sum of the ranks of the group's adapted projections, N parameters of an
// adapter.
#ifndef WEFT_SRC_LORA_LORA_LINEAR_H_
#define WEFT_SRC_LORA_LORA_LINEAR_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "src/lora/adapter.h"
#include "src/lora/lora_gradients.h"
#include "src/ops/matmul.h"

namespace weft::lora {

// Rows [begin, end) of the packed batch use `version`. Rows in no segment use
// only the base model. Segments are ordered and disjoint.
struct LoraSegment {
  int64_t begin = 0;
  int64_t end = 0;
  AdapterVersionPtr version;
};
using LoraRouting = std::vector<LoraSegment>;

// The frozen base layer.
struct BaseLinear {
  at::Tensor weight_OI;  // It may be in 8 bits (ops/int8_weight.h).
  at::Tensor bias_O;     // Undefined if there is no bias.
  ops::RowCount row_count = ops::RowCount::kRecurs;
};

// Names an adapted layer, and says where each of its projections writes in y.
struct LoraSite {
  int layer = 0;
  ProjectionGroup group = ProjectionGroup::kQkv;
  int expert = kNoExpert;
  // `shape` is that of the expert if there is one (ModelShape::OfExpert).
  // Returns the column of y where the output of `module` starts.
  [[nodiscard]] static int64_t ColumnOf(TargetModule module,
                                        const ModelShape& shape);
};

[[nodiscard]] inline const GroupLayout& GroupOf(const LoraSegment& segment,
                                                const LoraSite& site) {
  return segment.version->layout->group(site.layer, site.group, site.expert);
}

namespace cuda {
class RoutingTable;  // Declared in lora_cuda.h.
}  // namespace cuda
using RoutingTablePtr = std::shared_ptr<const cuda::RoutingTable>;

// Returns the routing in the form that kernels/cuda read, and queues its
// upload. Returns null if the kernels cannot take the routing. A pass through
// the layers makes the table once and keeps it to its end. A backward pass
// makes its own table, with gradients. Arguments: `gradients` is empty in a
// forward pass; `dtype` and `device` are those of the rows that the layers see;
// `decode_rows` is the number of all rows in a decode pass, and otherwise 0. In
// a decode pass all rows use the kernels of few rows.
[[nodiscard]] RoutingTablePtr MakeRoutingTable(const LoraRouting& routing,
                                               const LoraGradients& gradients,
                                               const ModelShape& shape,
                                               at::ScalarType dtype,
                                               at::Device device,
                                               int64_t decode_rows = 0);

// Returns the largest memory that a table's products need beside their
// operands: partial sums over rows of a gradient of `features` x `rank`.
[[nodiscard]] int64_t TableWorkspaceBytes(int64_t num_rows, int64_t features,
                                          int64_t rank);

// The arguments that all linear layers of a pass share.
struct LoraPass {
  const LoraRouting& routing;
  const ModelShape& shape;
  // Only on CUDA. If it is null there, segments run one after another.
  const cuda::RoutingTable* table = nullptr;
};

// x A^T, kept for the backward pass: [rows, R] of every segment, undefined if
// its adapter does not have the site. With a table there is one entry for all
// rows, which lora_cuda.h calls S.
using ShrunkInputs = std::vector<at::Tensor>;

// Returns y [T, O]. If `shrunk` is not null, sets it to x A^T.
// Shapes:  x_TI [T, I] contiguous, in the dtype of the base weight, or in f32
// with a bf16 weight on a CPU, or with a weight of 8 bits.
// Errors:  throws c10::Error.   Threads: on a CPU any, for distinct outputs.
[[nodiscard]] at::Tensor LoraLinear(const at::Tensor& x_TI,
                                    const BaseLinear& base,
                                    const LoraPass& pass, const LoraSite& site,
                                    ShrunkInputs* shrunk);

// Returns the `shrunk` of LoraLinear without computing y.
[[nodiscard]] ShrunkInputs LoraShrink(const at::Tensor& x_TI,
                                      const BaseLinear& base,
                                      const LoraPass& pass,
                                      const LoraSite& site);

// Adds dLoss/dA and dLoss/dB of each segment to its version's gradient [N].
// Returns dLoss/dx [T, I], or an undefined tensor if `want_input_gradient` is
// false.
// Shapes:    dy_TO like y; x_TI, `shrunk` and the routing as in LoraLinear.
// Arguments: if the pass has a table, it was made with these gradients.
[[nodiscard]] at::Tensor LoraLinearBackward(
    const at::Tensor& dy_TO, const at::Tensor& x_TI, const BaseLinear& base,
    const LoraPass& pass, const LoraSite& site, const ShrunkInputs& shrunk,
    const LoraGradients& gradients, bool want_input_gradient);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_LINEAR_H_
