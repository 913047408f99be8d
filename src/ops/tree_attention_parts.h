// The flash and eager implementations of tree and suffix attention, and
// functions that the attention files of src/ops share. The implementation for
// CPUs is in blocked_attention.h. Private to src/ops.
#ifndef WEFT_SRC_OPS_TREE_ATTENTION_PARTS_H_
#define WEFT_SRC_OPS_TREE_ATTENTION_PARTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/ops/suffix_attention.h"
#include "src/ops/tree_attention.h"

namespace weft::ops {

// `q_size` consecutive query rows and `k_size` consecutive key rows.
struct AttentionPart {
  int64_t q_begin = 0;
  int64_t q_size = 0;
  int64_t k_begin = 0;
  int64_t k_size = 0;
};

// Returns one part for each node that is not empty. In this part, the node's
// rows attend to the node's own rows. The parts cover all rows in order.
[[nodiscard]] std::vector<AttentionPart> SelfParts(
    const std::vector<AttentionNode>& nodes);

// Returns the parts in which descendants' rows attend to an ancestor's rows,
// one list (maybe empty) for each depth of the ancestor. The parts of one list
// have disjoint query rows.
[[nodiscard]] std::vector<std::vector<AttentionPart>> AncestorParts(
    const std::vector<AttentionNode>& nodes);

// Merges `part` into `out` and `lse`, which are the attention of the same query
// rows over other keys. Shapes: out [N, H, C], lse [N, H].
void MergeByLse(const AttentionOutput& part, at::Tensor& out_NHC,
                at::Tensor& lse_NH);

// Returns uninitialised memory for the output of attention with queries q_THC.
[[nodiscard]] AttentionOutput EmptyOutput(const at::Tensor& q_THC);

// Throws c10::Error if the sinks are defined but do not fit q_THC.
void CheckSinks(const at::Tensor& sinks_H, const at::Tensor& q_THC);

// Adds exp(sink) to the sum of each head's softmax, which shrinks `out` and
// raises `lse`. Does nothing if the sinks are undefined. Shapes: sinks [H], out
// [N, H, C], lse [N, H].
void AddSinks(const at::Tensor& sinks_H, at::Tensor& out_NHC,
              at::Tensor& lse_NH);

// The inputs of the forward and the backward pass.
struct AttentionInputs {
  const at::Tensor& q_THC;
  const at::Tensor& k_TKC;
  const at::Tensor& v_TKC;
  const AttentionRule& rule;
};

// The outputs of the backward pass. Only VarlenTreeAttentionBackward takes
// undefined tensors; see TreeAttentionBackward.
struct AttentionGradients {
  at::Tensor& dq_THC;
  at::Tensor& dk_TKC;
  at::Tensor& dv_TKC;
};

// These functions use the CUDA flash kernels (tree_attention_varlen.cc).
// VarlenSupports returns whether the kernels take q.
[[nodiscard]] bool VarlenSupports(const at::Tensor& q_THC);
// Returns whether the flash kernels take elements and heads of these sizes.
[[nodiscard]] bool FlashTakes(int64_t element_bytes, int64_t head_features);
[[nodiscard]] AttentionOutput VarlenTreeAttention(
    const AttentionInputs& inputs, const std::vector<AttentionNode>& nodes);
void VarlenTreeAttentionBackward(const at::Tensor& dout_THC,
                                 const AttentionInputs& inputs,
                                 const AttentionOutput& forward,
                                 const std::vector<AttentionNode>& nodes,
                                 AttentionGradients gradients);

// Computes all sequences in one call of the kernel.
[[nodiscard]] AttentionOutput VarlenSuffixAttention(
    const AttentionInputs& inputs, const std::vector<SuffixRows>& sequences);

// These functions use plain matrix products, for any rule; see
// tree_attention_eager.cc.
[[nodiscard]] AttentionOutput EagerTreeAttention(
    const AttentionInputs& inputs, const std::vector<AttentionNode>& nodes);
void EagerTreeAttentionBackward(const at::Tensor& dout_THC,
                                const AttentionInputs& inputs,
                                const AttentionOutput& forward,
                                const std::vector<AttentionNode>& nodes,
                                AttentionGradients gradients);

void EagerSuffixAttention(const AttentionInputs& inputs,
                          const std::vector<SuffixRows>& sequences,
                          AttentionOutput& result);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_TREE_ATTENTION_PARTS_H_
