// The RoutingTable (lora_cuda.h) for the experts of one layer. Each segment has
// rows of one adapter and one expert, so that one launch computes all experts.
#ifndef WEFT_SRC_LORA_EXPERT_TABLE_H_
#define WEFT_SRC_LORA_EXPERT_TABLE_H_

#include "src/lora/lora_cuda.h"

namespace weft::lora::cuda {

// The largest number of row blocks in a table. A row block has up to
// kernels::cuda::kLoraBlockRows rows of a segment. The grid of RunLoraExpand
// has one y index for each row block.
inline constexpr int64_t kMaxExpertBlocks = 65535;
// Returns whether the segments have at most kMaxExpertBlocks row blocks.
[[nodiscard]] bool FitsExpertTable(const ExpertRouting& routing);

// The table describes a one-layer model whose MLP is one expert. So the caller
// uses the sites of layer 0, and shape() is the shape of this model. In an
// adapter's buffer, the matrices of every expert of a layer have the same
// offsets from the expert's first matrix. So a segment has the address of its
// expert's first matrix, and all experts of an adapter share these offsets.
//
// No sum over features is split into parts. If the number of parts depended on
// the number of segments, the bits of an adapter's results would depend on
// other adapters. Also, the workspace for the parts of short segments would be
// larger than the rows of these segments.
class ExpertTable : public RoutingTable {
 public:
  // Queues the upload on the current stream and does not wait. `shape` is the
  // model's, and `gradients` are as for MakeExpertTable. Throws c10::Error on a
  // CUDA error, or if weights are not bf16 or a gradient is not f32.
  // REQUIRES: the routing has segments, and FitsExpertTable(routing).
  ExpertTable(const ExpertRouting& routing, int layer,
              const LoraGradients& gradients, const ModelShape& shape,
              at::Device device);
};

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_EXPERT_TABLE_H_
