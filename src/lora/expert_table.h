// The table of the experts of one layer (lora_cuda.h). Each segment has rows of
// one adapter and one expert, so that a launch computes all experts.
#ifndef WEFT_SRC_LORA_EXPERT_TABLE_H_
#define WEFT_SRC_LORA_EXPERT_TABLE_H_

#include "src/lora/lora_cuda.h"

namespace weft::lora::cuda {

// The most row blocks (kernels::cuda::kLoraBlockRows rows of a segment) of a
// table. A launch has a row of blocks in y for each.
inline constexpr int64_t kMaxExpertBlocks = 65535;
// Returns whether the segments have at most kMaxExpertBlocks row blocks.
[[nodiscard]] bool FitsExpertTable(const ExpertRouting& routing);

// In this table the layer is layer 0 of a model of one layer, whose MLP is one
// expert. So its sites are those of layer 0, and shape() is that of such a
// model. All experts of a layer have the same places in an adapter, counted
// from the expert's first matrix. A segment's addresses begin there.
//
// A sum over features has one part. If the number of parts depended on that of
// segments, an adapter's bits would depend on other adapters, and workspace for
// parts of short segments would be larger than the rows.
class ExpertTable : public RoutingTable {
 public:
  // Queues the upload on the current stream and does not wait. `shape` is the
  // model's, and `gradients` are as for MakeExpertTable. Throws c10::Error,
  // also if weights are not bf16 or a gradient is not f32.
  // REQUIRES: the routing has segments, and FitsExpertTable(routing).
  ExpertTable(const ExpertRouting& routing, int layer,
              const LoraGradients& gradients, const ModelShape& shape,
              at::Device device);
};

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_EXPERT_TABLE_H_
