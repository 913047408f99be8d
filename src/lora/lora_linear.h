// A linear layer whose rows belong to different adapters:
//   y = x W^T + bias + scale_a (x A_a^T) B_a^T   for the rows of adapter a.
//
// The routing is a short list of segments, and a segment is consecutive rows of
// one adapter. So no rows are sorted or gathered. Projections that share an
// input have one base GEMM with stacked weights, and one product by their
// stacked A (shrink). Each of these projections then has its own product by B
// (expand). If a CPU computes a base product in bf16, lora_bf16.h computes the
// layer with its adapters, except for experts.
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
#include "src/ops/grouped_matmul.h"
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

inline at::Tensor SegmentRows(const at::Tensor& tensor,
                              const LoraSegment& segment) {
  return tensor.narrow(0, segment.begin, segment.end - segment.begin);
}

// The segments of rows that are sorted by expert. A segment has rows of one
// adapter and one expert.
struct ExpertRouting {
  LoraRouting segments;
  std::vector<int> experts;  // The expert of each segment.
};

// A linear layer of the frozen base model.
struct BaseLinear {
  at::Tensor weight_OI;  // May be in 8 bits (ops/int8_weight.h).
  at::Tensor bias_O;     // Undefined if there is no bias.
  // If not null, each group of rows has its own weight and bias. The weights
  // are stacked, and so are the biases (ops::GroupedLinear).
  const ops::RowGroups* groups = nullptr;
};

// Names a group of projections in the model.
struct LoraSite {
  int layer = 0;
  ProjectionGroup group = ProjectionGroup::kQkv;
  int expert = kNoExpert;
  // Returns the column of y where the output of `module` starts. For an expert,
  // `shape` is the result of ModelShape::OfExpert.
  static int64_t ColumnOf(TargetModule module,
                          const model_config::ModelShape& shape);
};

inline const GroupLayout& GroupOf(const LoraSegment& segment,
                                  const LoraSite& site) {
  return segment.version->layout->group(site.layer, site.group, site.expert);
}

namespace cuda {
class RoutingTable;  // Declared in lora_cuda.h.
}  // namespace cuda
using RoutingTablePtr = std::shared_ptr<const cuda::RoutingTable>;

// Queues an upload of the routing in the form that the kernels of kernels/cuda
// read. Returns null if those kernels do not support the routing. The caller
// makes one table for a forward pass through all layers, and another table,
// with gradients, for a backward pass. A table must outlive its pass.
// Arguments: `gradients` is empty in a forward pass; `dtype` and `device` are
// those of the layers' input rows. In a decode pass (`decode`) the few-rows
// kernels compute all rows.
RoutingTablePtr MakeRoutingTable(const LoraRouting& routing,
                                 const LoraGradients& gradients,
                                 const model_config::ModelShape& shape,
                                 at::ScalarType dtype, at::Device device,
                                 bool decode = false);

// Like MakeRoutingTable, but makes an ExpertTable (lora_cuda.h) for the
// experts of one layer in one pass. Also returns null if the table has no room
// for the segments. `shape` is the model's.
RoutingTablePtr MakeExpertTable(const ExpertRouting& routing, int layer,
                                const LoraGradients& gradients,
                                const model_config::ModelShape& shape,
                                at::ScalarType dtype, at::Device device);

// The arguments that are the same for all linear layers of a pass.
struct LoraPass {
  const LoraRouting& routing;
  const model_config::ModelShape& shape;
  // Null on a CPU. If the table is null on CUDA, at::mm computes one segment
  // after another.
  const cuda::RoutingTable* table = nullptr;
};

// Returns whether the device finds the adapters of rows that it sorted by
// expert: if the pass has no adapters, or has the table of a decode pass.
bool FindsExpertRows(const LoraPass& pass);
// Like MakeExpertTable, but for rows in an order that the host does not know.
// Queues a launch that finds the adapters of the rows. Returns null if the pass
// has no adapters. REQUIRES: FindsExpertRows(pass).
// Shapes:  experts_TK [T, K], pairs_N as in ExpertRows of model/router.h.
RoutingTablePtr FindExpertRows(const LoraPass& pass, int layer,
                               const at::Tensor& experts_TK,
                               const at::Tensor& pairs_N);

// Returns an upper bound, in bytes, of the workspace that the gradient of any A
// or B of a layer needs if the pass has a table. The workspace holds partial
// sums over rows. The bound holds for any split of `num_rows` rows among
// adapters of at most this rank, if the rows of each adapter are one segment.
// For a table of experts, it holds if `num_rows` is the number of rows of all
// experts, `shape` is the result of OfExpert, and the rows of each adapter and
// expert are one segment.
int64_t GradientWorkspaceBytes(int64_t num_rows,
                               const model_config::ModelShape& shape,
                               int64_t rank);

// x A^T, which the backward pass needs; in f32 on a CPU, times each factor's
// scale. Without a table, there is one tensor [rows, R] for each segment. A
// segment's tensor is undefined if its adapter does not adapt the site. With a
// table, there is one tensor for all rows, called S in lora_cuda.h. S is
// undefined if no adapter adapts the site.
using ShrunkInputs = std::vector<at::Tensor>;

// Returns y [T, O]. If `shrunk` is not null, sets it to x A^T.
// Shapes:  x_TI [T, I] contiguous, in the dtype of the adapters' compute_N.
// ops::Linear (ops::GroupedLinear if base.groups is not null) must accept x_TI
// with the base weight.
// Errors:  throws c10::Error.
// Threads: any on a CPU, if each call has its own `shrunk`; the engine thread
// on CUDA.
at::Tensor LoraLinear(const at::Tensor& x_TI, const BaseLinear& base,
                      const LoraPass& pass, const LoraSite& site,
                      ShrunkInputs* shrunk);

// Returns the `shrunk` of LoraLinear without computing y.
ShrunkInputs LoraShrink(const at::Tensor& x_TI, const BaseLinear& base,
                        const LoraPass& pass, const LoraSite& site);

// Adds dLoss/dA and dLoss/dB of each segment to the gradient [N] of its
// version, if `gradients` has that version. Returns dLoss/dx [T, I], or an
// undefined tensor if `want_input_gradient` is false.
// Shapes:    dy_TO like y; x_TI, `shrunk` and the routing as in LoraLinear.
// Arguments: if pass.table is not null, it was made with `gradients`.
at::Tensor LoraLinearBackward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
                              const BaseLinear& base, const LoraPass& pass,
                              const LoraSite& site, const ShrunkInputs& shrunk,
                              const LoraGradients& gradients,
                              bool want_input_gradient);

// Computes gradient += scale * a b, with products and sums in the gradient's
// dtype. a and b have the same dtype, which may be narrower than the
// gradient's.
// Shapes: a [M, n], b [n, N]; gradient [M, N] may be a view.
void AddProduct(at::Tensor gradient, const at::Tensor& a, const at::Tensor& b,
                double scale);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_LINEAR_H_
